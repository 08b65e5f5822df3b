"""The Triton readout: in Triton's interpreter, compiled for a Hopper without one, and run where there is a GPU."""

import sys
from pathlib import Path

import pytest
import torch
from oracle import divergences
from pages import program

kernel = pytest.importorskip("eelib.lens.triton_readout", reason="Triton is not installed")
FEW_ROWS, FLOAT32, MANY_ROWS = kernel.FEW_ROWS, kernel.FLOAT32, kernel.MANY_ROWS
triton = pytest.importorskip("triton")
compare = pytest.importorskip("interpreted_kernel").compare  # which needs Triton, too
ROOT = Path(__file__).parents[2]
HOPPER_SHARED = 232_448  # bytes of shared memory that one program can have on compute capability 9.0


def test_against_float64_in_the_interpreter():
    """In a process of its own: the interpreter must be on before Triton is imported, and would stay on."""
    words = ["-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-q", "-x", "tests/interpreted_kernel.py"]
    run = program(ROOT, sys.executable, *words, TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "tiles", "given"),
    [
        ("scan_kernel", MANY_ROWS[0], {"REFERENCE": True}),
        ("scan_kernel", FEW_ROWS[0], {"TMA": False, "cap": 30.0, "after": 0.5, "head_bias": "pointer"}),
        ("divergence_kernel", kernel.PAIRED, {}),
        ("chosen_kernel", kernel.Tiles(64, 64, 64), {"TMA": False}),
        ("merge_kernel", kernel.Tiles(16, 0, 0), {"TMA": False, "REFERENCE": True}),
    ],
)
def test_compiles_for_hopper(name, tiles, given, monkeypatch, tmp_path):
    """Needs no GPU. Of matrices that the bulk copy engine can load, this and the tensor cores are used."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(kernel, name)
    constants = dict(vocabulary=131_072, width=4096, after=1.0, cap=0.0, head_bias=None, bias=None, k=10, SLOTS=16)
    constants |= dict(TMA=True, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, GROUP=32, SPLITS=4)
    constants |= dict(REFERENCE=False) | given
    whole = dict(n="i32", splits="i32", limit="fp32")
    ints = {"final_ids", "reference_ids", "ids", "above", "above_reference", "top_ids", "part_ids", "rank"}
    ints.add("rank_of_reference")
    types, attributes = {}, {}  # of each argument; pointers start at multiples of 16 bytes
    for index, argument in enumerate(function.arg_names):
        if argument in ("hidden", "hidden_last", "weight"):
            rows = tiles.columns if argument == "weight" else tiles.rows
            types[argument] = f"tensordesc<bf16[{rows}, {tiles.depth}]>" if constants["TMA"] else "*bf16"
        elif constants.get(argument, "pointer") != "pointer":
            types[argument] = "constexpr"
        else:
            types[argument] = whole.get(argument, "*i32" if argument in ints else "*fp32")
        if types[argument].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    fixed = {argument: constants[argument] for argument, kind in types.items() if kind == "constexpr"}
    made = triton.compile(
        triton.compiler.ASTSource(function, types, fixed, attributes),
        target=triton.backends.compiler.GPUTarget("cuda", 90, 32),
        options=dict(num_warps=tiles.warps, num_stages=tiles.stages),
    )
    if constants["TMA"]:
        assert "wgmma.mma_async" in made.asm["ptx"] and "cp.async.bulk.tensor" in made.asm["ptx"]
    assert made.metadata.shared * tiles.at_once <= HOPPER_SHARED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("rows", "width", "vocabulary"), [(1, 64, 1000), (65, 160, 4099), (300, 65, 777), (1000, 512, 32_000)]
)
def test_on_the_gpu(rows, width, vocabulary, dtype):
    """Compiled: as the float64 readouts and divergences, with every tile shape; the top token always has rank 1."""
    torch.manual_seed(rows)
    hidden = torch.randn(rows, width, device="cuda").to(getattr(torch, dtype))
    weight = (torch.randn(vocabulary, width, device="cuda") * 3 / width**0.5).to(hidden.dtype)
    last = hidden.roll(1, 0)
    last[-1] = hidden[-1]
    z, z_last = (states.double() @ weight.double().T for states in (hidden, last))
    final = torch.randint(0, vocabulary, (rows,), device="cuda")
    own = z.gather(1, final[:, None])
    shapes = (FLOAT32,) if dtype == "float32" else MANY_ROWS + FEW_ROWS
    for tiles in (None, *shapes):
        got = kernel.read_rows(hidden, kernel.Projection(weight), final, tiles=tiles, reference_ids=final)
        compare(got, z, final, 10, near=1e-4)
        torch.testing.assert_close(got["reference_logit"].double(), own[:, 0], rtol=1e-5, atol=1e-4)
        assert torch.equal(got["reference_rank"], got["final_rank"])
        again = kernel.read_rows(hidden, kernel.Projection(weight), got["top_ids"][:, 0], tiles=tiles)
        assert (again["final_rank"] == 1).all() and torch.equal(again["final_logit"], got["top_logits"][:, 0])
    norms = [z.logsumexp(-1), z_last.logsumexp(-1)]
    js, kl = kernel.read_divergences(hidden, kernel.Projection(weight), norms[0], last, norms[1])
    wanted = divergences(z.log_softmax(-1), z_last.log_softmax(-1))
    torch.testing.assert_close(js.double(), wanted[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(kl.double(), wanted[1], rtol=1e-3, atol=1e-5)
    assert js[-1] < 1e-6
