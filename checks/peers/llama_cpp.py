"""llama.cpp's greedy decoding of a GGUF file, in a process of its own: `python llama_cpp.py FILE THREADS`.

It answers one request per line on stdin, {ids, new_tokens}, with one line of JSON, {seconds, text, stopped}.
"""

import json
import sys
import time

import xllamacpp


def main(file: str, threads: str) -> None:
    """Load the file, then answer."""
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.n_gpu_layers = file, 2048, 1, 0
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = int(threads)
    options.verbosity = -1
    server = xllamacpp.Server(options)
    for line in sys.stdin:
        asked = json.loads(line)
        request = {"prompt": asked["ids"], "n_predict": asked["new_tokens"], "cache_prompt": False}
        began = time.perf_counter()
        made = server.handle_completions(request | {"temperature": 0, "top_k": 1})
        choice = made["choices"][0]
        found = {"seconds": time.perf_counter() - began, "text": choice["text"]}
        print(json.dumps(found | {"stopped": choice["finish_reason"] == "stop"}), flush=True)


main(*sys.argv[1:])
