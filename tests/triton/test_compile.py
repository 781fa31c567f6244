"""Every kernel compiles to machine code for every architecture, without a GPU.

A driver that names the architecture stands in for the real one, and the launchers are called as always; each launch
compiles and stops there. In fresh interpreters, since this process interprets its kernels if it has no GPU.
"""

import pytest
from support.plugins import run_python

pytest.importorskip("triton", reason="triton is not installed")

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90a": ("cuda", 90, 32),
    "sm_100a": ("cuda", 100, 32),
    "sm_120a": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}

PROGRAM = r"""
import collections, re, torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Driver:
    def get_current_target(self): return GPUTarget(*{target!r})
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
    def get_active_torch_device(self): return torch.device("cpu")
    def get_benchmarker(self): return None

driver.set_active(Driver())
launch, compiled = JITFunction.run, collections.defaultdict(list)
access = re.compile(r"griddepcontrol\.\w+|(?:ld|st|atom|red|prefetch)\.[\w.]*global[\w.:]*")

def compile_only(self, *args, grid, warmup, **kwargs):
    kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
    early = getattr(kernel.metadata, "launch_pdl", None)
    compiled[self.__name__].append([early, access.findall(kernel.asm.get("ptx", ""))])
    binary = [kernel.asm[name] for name in ("cubin", "hsaco") if name in kernel.asm]
    assert binary and len(binary[0]) > 1000, f"no machine code for {{self.__name__}}"
    return kernel

JITFunction.run = compile_only
# A binary that is kept is launched without that.
CompiledKernel.run = lambda self, *args: None

import importlib
import loss_triton
from loss_core.backend import CrossEntropyOptions

def shared(table, classes, held, vector):
    how = parts_of(table, classes, held, vector)
    # The other compiler takes no number of registers.
    return how if how is None or {target!r}[0] == "cuda" else how._replace(registers=None)

modules = [importlib.import_module("loss_triton." + name) for name in ("cross_entropy", "softmax")]
for module in modules:
    parts_of, module.parts_of = module.parts_of, shared

def hold(held):
    # Rows are held as a whole everywhere, or nowhere, not just where that is faster.
    for module in modules:
        module.had_better_hold = lambda device: held
    modules[0]._plan.cache_clear()

EVERYTHING = dict(label_smoothing=0.1, z_loss=0.01, softcap=30.0, logit_scale=0.5)

def cross_entropy(classes, dtype, reduction, weighted, stats, **options):
    logits = torch.empty(4, classes, dtype=dtype)
    options = CrossEntropyOptions(reduction=reduction, **options)
    target = torch.zeros(4, dtype=torch.int64)
    weight = torch.ones(classes) if weighted else None
    lengths = torch.ones(4, dtype=torch.int32) if reduction == "byte_mean" else None
    grad = None if reduction == "none" else torch.empty_like(logits)
    out = loss_triton.cross_entropy_forward(
        logits, target, weight, lengths, None, options, grad=grad, stats=stats
    )
    upstream = torch.ones(4 if reduction == "none" else 1)
    loss_triton.cross_entropy_backward(
        upstream, logits, target, weight, out.lse, out.denominator, options, grad=torch.empty_like(logits),
        skip_if_one=reduction != "none",
    )
    loss_triton.cross_entropy_rescale_live(upstream[:1], torch.empty_like(logits), target, -100)

# Rows that start on 16 bytes and rows that do not; one block and many; several programs.
hold(False)
cross_entropy(20001, torch.bfloat16, "mean", False, False)
x = torch.empty(4, 20001, dtype=torch.bfloat16)
loss_triton.softmax_forward(x, torch.empty_like(x))
loss_triton.softmax_backward(x, x, torch.empty_like(x))
hold(True)
cross_entropy(20001, torch.bfloat16, "mean", False, False)
cross_entropy(50257, torch.bfloat16, "mean", False, False)
cross_entropy(1000, torch.float16, "mean", True, True, **EVERYTHING)
widths = [(32, torch.float16), (20001, torch.bfloat16), (50257, torch.bfloat16)]
if {thorough}:
    cross_entropy(1000, torch.float32, "none", False, False)
    cross_entropy(2**17, torch.float32, "mean", False, False)
    cross_entropy(50257, torch.float16, "byte_mean", True, False, label_smoothing=0.1)
    widths += [(1000, torch.float32), (2**17, torch.float16)]
for logits in (torch.empty(4, 50257), torch.empty(4, 20001, dtype=torch.bfloat16)):
    loss_triton.cross_entropy_forward(
        logits, torch.zeros(4, dtype=torch.int64), None, None, None, CrossEntropyOptions(), grad=None, stats=False
    )
for op in ("softmax", "log_softmax"):
    for classes, dtype in widths:
        x = torch.empty(4, classes, dtype=dtype)
        getattr(loss_triton, op + "_forward")(x, torch.empty_like(x))
        getattr(loss_triton, op + "_backward")(x, x, torch.empty_like(x))
for inner, dtype in [(4096, torch.bfloat16), (33, torch.float32)]:
    x = torch.empty(2, 1000, inner, dtype=dtype)
    loss_triton.softmax_columns_forward(x, torch.empty_like(x))
    loss_triton.softmax_columns_backward(x, x, torch.empty_like(x))

import inspect
kernels = set()
for module in (
    loss_triton.cross_entropy, loss_triton.softmax, loss_triton.softmax_columns, loss_triton.denominator
):
    source = module if inspect.ismodule(module) else inspect.getmodule(module)
    for name, value in vars(source).items():
        if isinstance(getattr(value, "jit", value), JITFunction) and name.endswith("_kernel"):
            kernels.add(name)
report([compiled, sorted(kernels)])
"""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in TARGETS])
def target(request):
    return request.param


@pytest.fixture(scope="module")
def reported(target, tmp_path_factory):
    """By kernel, of each of its binaries: launch_pdl, and in PTX its accesses to memory and to the grid before it.

    And the names of all kernels.
    """
    program = PROGRAM.format(target=TARGETS[target], thorough=target == "sm_90a")
    return run_python(program, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp(target)))


def test_every_kernel_compiles(reported):
    compiled, kernels = reported
    assert set(kernels) <= set(compiled), f"never launched: {set(kernels) - set(compiled)}"
    assert len(kernels) >= 6


def test_what_is_launched_early_waits_before_it_touches_memory(target, reported):
    compiled, _ = reported
    backend, architecture, _ = TARGETS[target]
    dependent = {"cross_entropy_bwd_kernel", "cross_entropy_rescale_live_kernel"}
    for name, binaries in compiled.items():
        for early, accesses in binaries:
            if backend != "cuda":
                # The option is unknown there.
                assert early is None, name
                continue
            waits = architecture // 10 in (9, 10) and name in dependent
            assert early == waits, name
            assert (accesses[0] == "griddepcontrol.wait") == waits, name
            assert accesses.count("griddepcontrol.wait") == waits, name


def test_programs_that_wait_for_their_target_foresee_those_to_come(target, reported):
    """Where a row is held for its gradient; other kernels ask for theirs before they know the target."""
    compiled, _ = reported
    foreseeing = {name for name, binaries in compiled.items() if any("prefetch.global.L1" in a for _, a in binaries)}
    assert foreseeing == ({"cross_entropy_fwd_grad_parts_kernel"} if TARGETS[target][0] == "cuda" else set())
