// Greedy decoding, each token read at every layer; and what the worker answers.
Lens.part(function (Lens) {
    // Lets messages in between two tokens; a timer would wait for milliseconds.
    function breath() {
        return new Promise((go) => {
            const { port1, port2 } = new MessageChannel();
            port1.onmessage = () => {
                port1.close();
                go();
            };
            port2.postMessage(null);
        });
    }

    Lens.Writer = class {
        constructor(shape, tokenizer, tensor) {
            this.network = new Lens.Network(shape, tensor);
            this.reader = new Lens.Reader(this.network);
            this.tokenizer = new Lens.Tokenizer(tokenizer);
            this.kept = []; // the last prompt's tokens whose keys and values are there
        }

        // Write on from `before` + `sentence` + `after`, at most `room` tokens. With a `rule`, tokens leave where it
        // says, and later ones find copies of their keys and values at the blocks that did not run; the prompt runs
        // all blocks. `tell` gets each token; `stopped` ends it. Returns null, or one line that says why not.
        async write({ before, sentence, after, rule, room }, tell, stopped) {
            const text = sentence.trim();
            if (!text) return "Type a sentence first.";
            const frame = this.tokenizer.encode(before + after).length;
            const most = this.network.window - room;
            if (text.length > most * this.tokenizer.longest) {
                return `This sentence is too long: the model has room for ${(most - frame).toLocaleString("en")} tokens.`;
            }
            const prompt = this.tokenizer.encode(before + text + after);
            if (prompt.length > most) {
                const [has, may] = [prompt.length - frame, most - frame].map((count) => count.toLocaleString("en"));
                return `This sentence is too long: ${has} tokens, and the model has room for ${may}.`;
            }
            const last = prompt.length - 1;
            let place = 0;
            while (place < last && prompt[place] === this.kept[place]) place++;
            this.kept.length = place;
            for (; place < last; place++) {
                this.network.run(prompt[place], place);
                this.kept.push(prompt[place]);
                if (place % 16 === 15) await breath();
                if (stopped()) return null;
            }
            let token = prompt[last];
            for (let written = 0; written < room; written++) {
                const found = this.next(token, place, rule, written === 0);
                tell(found);
                [token, place] = [found.id, place + 1];
                await breath();
                if (stopped() || this.network.ends.includes(token)) return null;
            }
            return null;
        }

        // Run a token, and read what comes after it. `ran`: how many blocks did; readouts of layers 0..ran.
        next(token, place, rule, inPrompt) {
            const { network, reader } = this;
            let readouts = [];
            let ran = network.layers;
            if (rule && !inPrompt) {
                const leaves = Lens.asked(rule);
                ran = network.run(token, place, (_, state) => {
                    readouts.push(...reader.read([state]));
                    return leaves(readouts[readouts.length - 1]);
                });
                const unread = ran === network.layers ? [0, ran] : [0];
                const [first, last] = reader.read(unread.map((layer) => network.states[layer]));
                readouts = [first, ...readouts, ...(last ? [last] : [])];
            } else {
                network.run(token, place);
                readouts = reader.read(network.states);
            }
            const exit = rule && inPrompt ? Lens.exitLayer(rule, readouts) : ran;
            const id = readouts[exit].ids[0];
            const named = new Set([id, ...readouts.flatMap(({ ids }) => ids)]);
            return {
                id,
                exit,
                ran,
                ids: readouts.map(({ ids }) => ids),
                shares: readouts.map(({ shares }) => shares),
                entropy: readouts.map(({ entropy }) => entropy),
                pieces: Object.fromEntries([...named].map((i) => [i, this.tokenizer.pieces[i] ?? `<${i}>`])),
            };
        }
    };

    // In the worker: parts of the model come first, then requests; the newest ends those before it.
    Lens.serve = function (scope) {
        let head, weights, writer;
        let newest = 0;
        let waiting = Promise.resolve();
        const send = (message) => scope.postMessage(message);

        async function take(part) {
            if (!head) [head, weights] = [part, new Lens.Weights(part)];
            else await weights.put(part);
            send({ kind: "taken" });
        }

        async function answer(request) {
            writer ??= new Lens.Writer(head.shape, head.tokenizer, (name) => weights.tensor(name));
            const begun = performance.now();
            const stopped = () => request.number !== newest;
            const tell = (token) => send({ kind: "token", number: request.number, token });
            const refused = await writer.write(request, tell, stopped);
            const seconds = (performance.now() - begun) / 1000;
            send({ kind: "done", number: request.number, refused, seconds });
        }

        scope.onmessage = ({ data }) => {
            if (data.number) newest = data.number;
            const work = { part: () => take(data.part), write: () => answer(data), stop: () => null }[data.kind];
            waiting = waiting.then(work).catch((error) => send({ kind: "failed", line: String(error.message || error) }));
        };
    };
});
