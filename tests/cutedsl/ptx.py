"""The few PTX instructions that are made of comparisons, in Python: a register is an array with a number a lane.

After the PTX ISA: comparisons are false where one side is NaN, those that end in "u" and ``nan`` are then true; ``max``
gives the other side of NaN and with ``.NaN`` the NaN.
"""

import re

import numpy as np

COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
KINDS = {"f32": np.float32, "s32": np.int32, "u32": np.uint32}


def compare(name, a, b):
    if name in COMPARE:
        return COMPARE[name](a, b)
    # Such as "gtu", which "ltu" for the integers, "lo" and the like, is not.
    return COMPARE[name[:-1]](a, b) | COMPARE["nan"](a, b)


def ptx(code, outputs=None, inputs=None, predicate=None):
    """As ``loss_cutedsl._device.ptx``."""
    assert predicate is None
    registers = {f"r{i}": np.asarray(value) for i, value in enumerate(inputs)}

    def value(name, kind=None):
        if name.startswith("!"):
            return ~value(name[1:])
        found = registers[name] if name in registers else np.asarray(int(name, 0))
        return found if kind is None or found.dtype == kind else found.astype(np.int64).astype(kind)

    code = re.sub(r"\{\$([rw]\d)\}", r"\1", code).strip().removeprefix("{").removesuffix("}")
    for statement in filter(None, (part.strip() for part in code.split(";"))):
        operation, rest = statement.split(None, 1)
        operands = [operand.strip() for operand in rest.split(",")]
        match operation.split("."):
            case ["", "reg"]:
                continue
            case ["setp", name, kind]:
                result = compare(name, *(value(operand, KINDS[kind]) for operand in operands[1:]))
            case ["setp", name, combine, kind]:
                result = compare(name, *(value(operand, KINDS[kind]) for operand in operands[1:3]))
                result = COMBINE[combine](result, value(operands[3]))
            case ["selp", _]:
                result = np.where(value(operands[3]), value(operands[1]), value(operands[2]))
            case ["max", "NaN", "f32"]:
                result = np.maximum(value(operands[1]), value(operands[2]))
            case ["max", _]:
                result = np.fmax(value(operands[1]), value(operands[2]))
            case ["or", "pred"]:
                result = value(operands[1]) | value(operands[2])
            case ["shfl", "sync", "bfly", "b32"]:
                result = value(operands[1])[np.arange(32) ^ int(operands[2])]
            case _:
                raise NotImplementedError(statement)
        registers[operands[0]] = np.asarray(result)
    results = [registers[f"w{i}"] for i in range(len(outputs))]
    return results[0] if len(results) == 1 else results
