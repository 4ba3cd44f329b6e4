"""The Triton kernels without a GPU: the code that Triton's compiler generates, and positions beyond any test's memory.

Run as a program, this file compiles the kernels and prints counts that the test checks. It runs in a process of its
own, because Triton chooses between its compiler and its interpreter once, when it is imported.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hdet_kernels.ops import OPTIONAL_STATES, STATES, backends
from hdet_kernels.ops.chunks import CHUNK, GRADIENT_DTYPES, ChunkTable
from hdet_kernels.ops.torch.rounding import random_bits, round_stochastically, rounding_key
from hdet_kernels.tensors import Slot
from tests.ops.cases import (
    BF16,
    FP32,
    FP64,
    PRECISIONS,
    RULES,
    Precision,
    assert_same,
    available,
    make_case,
    make_table,
)

triton = pytest.importorskip("triton", reason=f"triton: {backends.backends()['triton']}")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hdet_kernels.ops.triton import pack as triton_pack  # noqa: E402
from hdet_kernels.ops.triton import rules as triton_rules  # noqa: E402
from hdet_kernels.ops.triton import step as triton_step  # noqa: E402
from hdet_kernels.ops.triton import wire as triton_wire  # noqa: E402
from hdet_kernels.ops.triton.rounding import key_of, random_base, write  # noqa: E402

TRITON = [available("triton", "cuda"), available("triton", "cpu")]

# Compute capabilities: A100, H100 and H200, B200.
TARGETS = (80, 90, 100)
WIRE = (triton_wire._encode, triton_wire._merge, triton_wire._decode)
_POINTERS = {FP32: "*fp32", FP64: "*fp64", BF16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8"}
CODED = {
    "coded-fp32": Precision(FP32, torch.uint8, (FP32,)),
    "coded-bf16": Precision(BF16, torch.uint8, (BF16,)),
}


def kernels() -> Iterator[tuple[str, Any, dict[str, str | None], dict[str, object], int]]:
    """Yield identifier, kernel, types of the non-constant arguments (``None`` if absent), constants, target."""
    for name, (rule, row) in RULES.items():
        for label, precision in PRECISIONS.items():
            for target in TARGETS:
                # On one target all rules in one precision and all precisions with one rule; on the others one of each.
                if (label == "bf16-master" or name == "adamw") if target == 90 else (name, label) == ("adamw", "fp32"):
                    types = _flat_types(rule, precision, bool(row.get("momentum") or row.get("amsgrad")))
                    constants = _walk_constants(rule, precision, stochastic=label == "bf16-state-bf16")
                    yield f"{name}-{label}-sm{target}", triton_step._walk, types, constants, target
    yield (
        "adamw-bf16-nearest",
        triton_step._walk,
        _flat_types("adamw", PRECISIONS["bf16-state-bf16"], False),
        _walk_constants("adamw", PRECISIONS["bf16-state-bf16"], stochastic=False),
        90,
    )
    for name, label in (("adamw", "fp32"), ("sgd-decay", "fp32"), ("adam", "bf16-master"), ("lion", "bf16-state-bf16")):
        (rule, row), precision = RULES[name], PRECISIONS[label]
        types = _flat_types(rule, precision, bool(row.get("momentum") or row.get("amsgrad")))
        constants = _walk_constants(rule, precision, stochastic=label == "bf16-state-bf16")
        constants |= {"SHARED": True}
        yield f"rows-{name}-{label}", triton_step._walk, types, constants, 90
    for label, precision in CODED.items():
        for name in ("adamw", "sgd-momentum") if label == "coded-bf16" else ("adam",):
            rule, row = RULES[name]
            types = _flat_types(rule, precision, bool(row.get("momentum") or row.get("amsgrad")))
            constants = _walk_constants(rule, precision, stochastic=precision.param == BF16)
            yield f"{name}-{label}", triton_step._walk, types, constants, 90
            constants |= {"SHARED": True}
            yield f"rows-{name}-{label}", triton_step._walk, types, constants, 90
    scalars = {"scale": "*fp32", "norm": "*fp64", "found_inf": "*fp32"}
    tables = {"steps": "*fp32", "table": "*fp64", "slots": "*i64", "gradients": "*i64", "plan": "*i64", "count": "i32"}
    tables |= {"rows": "i32", "groups": "i32", "rows_per_norm": "i32"}
    for rule in STATES:
        constants = {"RULE": rule, "RANDOM": rule != "adagrad", "SLOTS": triton_step.SLOTS}
        numbers = {"numbers": "*fp64" if rule == "adam" else "*fp32"}
        given = dict.fromkeys(scalars) if rule == "lion" else scalars
        yield f"advance-{rule}", triton_step._advance, tables | numbers | given, constants, 90
    types = {"chunks": "*i64", "gradients": "*i64", "partials": "*fp64", "count": "i32", "each": "i32"}
    types["programs"] = "i32"
    yield "reduce", triton_step._reduce, types, {}, 90
    types = {"partials": "*fp64", "result": "*fp64", "count": "i32"}
    yield "finish", triton_step._finish, types, {"PROGRAMS": triton_step.PROGRAMS}, 90
    yield from _split_masters()
    yield from _packing()
    yield from _wire_kernels()


def _split_masters() -> Iterator[tuple[str, Any, dict[str, str | None], dict[str, object], int]]:
    for state, label in ((FP32, "fp32"), (BF16, "bf16"), (torch.uint8, "coded")):
        precision = Precision(BF16, state, (BF16,))
        types = _flat_types("adamw", precision, False) | {"master": "*i16"}
        constants = _walk_constants("adamw", precision, stochastic=False)
        yield f"split-{label}", triton_step._walk, types, constants, 90
        constants = constants | {"SHARED": True, "BLOCK": triton_step.block_of_rows(constants["VECTOR"])}
        yield f"rows-split-{label}", triton_step._walk, types, constants, 90


def _wire_kernels() -> Iterator[tuple[str, Any, dict[str, str | None], dict[str, object], int]]:
    for format, codes in (("bf16", "*bf16"), ("int8", "*i8")):
        scales = None if format == "bf16" else "*fp32"
        wire, sizes = {"codes": codes, "scales": scales}, {"tiles": "i32", "numel": "i64"}
        flats = dict.fromkeys(("x", "consensus", "error", "target"), "*fp32")
        merged = {"to_codes": codes, "to_scales": scales, "rows": "i32", "divisor": "fp32"}
        yield f"encode-{format}", triton_wire._encode, wire | sizes | flats, {}, 90
        yield f"merge-{format}", triton_wire._merge, wire | sizes | flats | merged, {}, 90
        yield f"decode-{format}", triton_wire._decode, wire | sizes | flats, {}, 90


def _packing() -> Iterator[tuple[str, Any, dict[str, str | None], dict[str, object], int]]:
    tables: dict[str, str | None] = {"chunks": "*i64", "places": "*i64", "strides": "*i64", "divisor": "i64"}
    for dtype in (FP32, FP64):
        types = tables | {"staging": _POINTERS[dtype], "first": "i32", "others": "i32", "rows": "i32"}
        for divide in (False, True):
            constants: dict[str, object] = {"DIVIDE": divide, "BLOCK": triton_pack.BLOCK}
            label = f"{str(dtype).removeprefix('torch.')}-{'over' if divide else 'as-is'}"
            yield f"unpack-{label}", triton_pack._unpack_chunk, types, constants, 90
            for many in (False, True):
                shape = {"MANY": many, "BLOCK": triton_pack.BLOCK_OF_ROWS if many else triton_pack.BLOCK}
                yield f"pack-{'rows' if many else 'one'}-{label}", triton_pack._pack_chunk, types, constants | shape, 90


def _flat_types(rule: str, precision: Precision, optional: bool) -> dict[str, str | None]:
    states = [optional or name not in OPTIONAL_STATES for name in STATES[rule]]
    return {
        "param": _POINTERS[precision.param],
        "master": "*fp32" if precision.master else None,
        **{f"state{i}": _POINTERS[precision.state] if [*states, False, False][i] else None for i in range(3)},
        **{f"scales{i}": "*fp32" if precision.state == torch.uint8 and states[i] else None for i in range(len(states))},
        "numbers": "*fp64" if precision.param == FP64 else "*fp32",
        "plan": "*i64",
        "chunks": "*i64",
        "rows": "i32",
        "row_size": "i64",
        "slot_count": "i32",
    }


def _walk_constants(rule: str, precision: Precision, *, stochastic: bool) -> dict[str, Any]:
    case = make_case(rule, (1,), precision.param, "cpu", optional=True, state=precision.state, master=precision.master)
    grad = precision.grads[0]
    return {
        "NUMBER": GRADIENT_DTYPES.index(grad),
        "TYPE": triton_step._TYPES[grad],
        "RULE": rule,
        "STOCHASTIC": stochastic,
        "RANDOM": stochastic or precision.state == torch.uint8,
        "CODED": precision.state == torch.uint8,
        "VECTOR": triton_step.vector_of(grad, *case.flats()),
        "SHARED": False,
    }


def compile_kernels() -> dict[str, dict[str, int]]:
    """Compile the kernels and count what the test checks."""
    made = {}
    for name, kernel, types, constants, target in kernels():
        arguments = dict(enumerate(kernel.arg_names))
        signature = {argument: types.get(argument) or "constexpr" for argument in arguments.values()}
        constexprs = {(i,): constants.get(argument) for i, argument in arguments.items() if not types.get(argument)}
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, a in arguments.items() if (types.get(a) or "").startswith("*")
        }
        options = triton_wire.OPTIONS if kernel in WIRE else {"num_warps": 4}
        if kernel is triton_step._walk:
            rows, stochastic = 1 + constants["SHARED"], bool(constants["STOCHASTIC"])
            shape = triton_step.shape_of(constants["VECTOR"], rows, stochastic=stochastic, coded="coded" in name)
            constexprs[(kernel.arg_names.index("BLOCK"),)] = shape["BLOCK"]
            options = {option: value for option, value in shape.items() if option != "BLOCK"}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
        limited = kernel is triton_step._walk and "maxnreg" in options
        whole_blocks = compiled.asm["ttgir"].split("} else {")[0]
        made[name] = {
            "loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", compiled.asm["ptx"])),
            "stores": len(re.findall(r"st\.global[.\w:]*\.v4\.b32", compiled.asm["ptx"])),
            "moves": whole_blocks.count("ttg.convert_layout"),
            "shared": compiled.metadata.shared,
            "inexact": len(re.findall(r"\bfma\.|\.ftz|div\.(?!rn)|\.approx", compiled.asm["ptx"])),
            "spills": _spills_of_whole_blocks(compiled) if limited else 0,
            "bytes_of_floats": _bytes_of_floats(compiled.asm["ptx"]),
            "values": len([p for p in kernel.params if types.get(p.name) == "i32" and not p.do_not_specialize]),
        }
    return made


def _spills_of_whole_blocks(compiled: Any) -> int:
    """Count accesses to spilled registers before the last vector is stored: blocks that are not whole come later."""
    instructions = compiled.asm["sass"].splitlines()
    last = max(i for i, instruction in enumerate(instructions) if "STG.E.128" in instruction)
    return sum("LDL" in instruction or "STL" in instruction for instruction in instructions[:last])


def _bytes_of_floats(ptx: str) -> int:
    """Count stores of the lowest byte of a register that a float instruction wrote.

    From such a store ptxas 12.8, which comes with Triton 3.6, makes a conversion of the float to a whole number.
    """
    floats = set(re.findall(r"^\s*\w[\w.]*\.f32\s+(%r\d+),", ptx, re.MULTILINE))
    stored = re.findall(r"\bst\.\w+\.b8\s+\[[^]]*\],\s*\{?\s*(%r\d+)", ptx)
    return sum(register in floats for register in stored)


@pytest.mark.full
def test_the_kernels_compile_to_vector_accesses(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout)
    assert len(made) >= 50
    # 1024 elements and 4 warps or 512 and 2: 8 for each thread, two vectors of fp32 or one of bf16, for each buffer.
    for target in TARGETS:
        assert (made[f"adamw-fp32-sm{target}"]["loads"], made[f"adamw-fp32-sm{target}"]["stores"]) == (8, 6)
    for name in ("adamw-bf16-nearest", "adamw-bf16-state-bf16-sm90"):
        assert (made[name]["loads"], made[name]["stores"]) == (4, 3)
    # Gradient, moments, parameter and lower half of its master: vectors of 8 elements.
    assert (made["split-bf16"]["loads"], made["split-bf16"]["stores"]) == (5, 4)
    # One vector for each thread, of the gradient and the states, and of one row after the other.
    assert (made["rows-adamw-fp32"]["loads"], made["rows-adamw-fp32"]["stores"]) == (3 + 1, 2 + 1)
    assert (made["rows-lion-bf16-state-bf16"]["loads"], made["rows-lion-bf16-state-bf16"]["stores"]) == (2 + 1, 1 + 1)
    # 512 elements and one warp: 16 for each thread, four vectors of each buffer.
    for name in ("bf16", "int8"):
        encoding, merging, decoding = (made[f"{part}-{name}"] for part in ("encode", "merge", "decode"))
        assert (encoding["loads"], encoding["stores"]) == (12, 4)
        assert merging["loads"] >= 4
        assert (decoding["loads"], decoding["stores"]) == (4, 8)
        for part in (encoding, merging, decoding):
            assert part["shared"] == 0, "elements of a block move between threads"
            assert part["inexact"] == 0, "the bits would not be those of plain torch"
    # 2048 elements of one row: four vectors for each thread. 512 of several: one of each of nine rows.
    for divided in ("as-is", "over"):
        assert (made[f"pack-one-float32-{divided}"]["loads"], made[f"unpack-float32-{divided}"]["stores"]) == (4, 4)
        assert made[f"pack-rows-float32-{divided}"]["loads"] == 9
    for name, seen in made.items():
        assert seen["moves"] == 0, f"{name}: elements of a whole block move between threads"
        assert seen["spills"] == 0, f"{name}: whole blocks spill registers"
        assert seen["bytes_of_floats"] == 0, f"{name}: ptxas may store other bytes"
        assert seen["values"] == 0, f"{name} would be compiled again for another count"


def test_bytes_of_floats_are_found_in_the_text_of_a_kernel() -> None:
    result = "\tadd.f32 \t%r1, %r0, 0f4B400080;\n"
    assert _bytes_of_floats(result + "\tst.shared.b8 \t[%r9+8], %r1;\n") == 1
    assert _bytes_of_floats(result + "\tst.shared.b32 \t[%r9+8], %r1;\n") == 0
    assert _bytes_of_floats(result + "\tadd.s32 \t%r2, %r1, 128;\n\tst.shared.b8 \t[%r9+8], %r2;\n") == 0


@pytest.mark.parametrize("function", ["derive", "push", "move"])
def test_every_rule_has_a_branch_and_another_rule_is_an_error(function: str) -> None:
    source = inspect.getsource(getattr(triton_rules, function).fn)
    assert re.findall(r'if RULE == "(\w+)":', source) == list(STATES)
    assert f'    else:\n        tl.static_assert(False, "{function} has no branch' in source


@triton.jit
def _derive_unknown(n, row, t):
    triton_rules.derive("adamax", n, row, t, t <= 1, t > 0)


@pytest.mark.parametrize("backend", TRITON)
def test_a_rule_without_a_branch_does_not_run_as_another(backend: tuple[str, str]) -> None:
    numbers, row = torch.zeros(16, device=backend[1]), torch.zeros(16, dtype=FP64, device=backend[1])
    with pytest.raises(Exception) as failure:  # noqa: PT011 (the interpreter and the compiler raise different types)
        _derive_unknown[(1,)](numbers, row, 1)
    # The compiler reports the line that called, and the assertion as the cause.
    causes: list[BaseException] = [failure.value]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    assert any("derive has no branch for this update rule" in str(cause) for cause in causes)


def test_a_chunk_is_whole_blocks() -> None:
    for block in (
        triton_step.BLOCK,
        triton_step.STOCHASTIC["BLOCK"],
        triton_step.CODED["BLOCK"],
        triton_pack.BLOCK,
        triton_pack.BLOCK_OF_ROWS,
    ):
        assert CHUNK % block == 0
    for vector in (2, 4, 8):
        assert CHUNK % triton_step.block_of_rows(vector) == 0
    assert CHUNK & (CHUNK - 1) == 0, "Triton's ranges are powers of two"


@triton.jit
def _round_at(values, rounded, where):
    """Round 64 values stochastically, as those of stream 3 from a flat position on. ``where``: position, seed, t."""
    offset = tl.load(where)
    lanes = tl.arange(0, 64)
    at = offset + lanes
    base = random_base(at >> 2, key_of(tl.load(where + 1).to(tl.float64), tl.load(where + 2).to(tl.float64)))
    write(rounded - offset, at, tl.load(values + lanes), lanes < 64, base, 3, True)


@pytest.mark.parametrize("offset", [1, 2, 17, 2**32 - 40, 2**33 - 4, 2**33 + 2**32 + 5], ids=hex)
@pytest.mark.parametrize("backend", TRITON)
def test_random_bits_are_those_of_plain_torch_at_any_position(backend: tuple[str, str], offset: int) -> None:
    device, seed, t = backend[1], 2**32 - 3, 77
    values = torch.rand(64, generator=torch.Generator().manual_seed(0))
    got = torch.empty(64, dtype=BF16, device=device)
    _round_at[(1,)](values.to(device), got, torch.tensor([offset, seed, t], device=device))
    key = rounding_key(torch.tensor(seed, dtype=FP64), torch.tensor(t, dtype=FP64))
    expected = round_stochastically(values, random_bits(key, 3, offset, values))
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("backend", TRITON)
def test_slots_at_odd_offsets(backend: tuple[str, str], stochastic: bool) -> None:
    """Buckets align every slot, but other callers' tables need not."""
    where, device = backend
    results = []
    for run, place in ((where, device), ("torch", "cpu")):
        case = make_case("sgd", (3000,), BF16, place, optional=False, grads=(FP32,))
        slots = [Slot(0, 65, 1027, (1027,), (1,)), Slot(0, 1101, 1030, (1030,), (1,))]
        case.chunks = ChunkTable(slots, [0, 0], case.param.device, BF16)
        (grad,) = case.grads
        assert grad is not None
        case.grads = [grad[:1027], grad[1028 : 1028 + 1030]]
        case.steps = torch.zeros(2, device=place)
        case.step(make_table(place, {"lr": 0.5, "seed": 3}), run, stochastic_rounding=stochastic)
        results.append([case.param])
    assert_same(*results)


if __name__ == "__main__":
    print(json.dumps(compile_kernels()))
