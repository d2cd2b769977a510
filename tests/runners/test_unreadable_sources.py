"""Sources of every kind of tensor that torch has: each ends in a right result or a BatchError, and none in an abort."""

import subprocess
import sys
from typing import Final

KINDS: Final = {
    "nested": ("torch.nested.nested_tensor([torch.ones(1)] * 2)", None),
    "nested of one length": ("torch.nested.nested_tensor([torch.tensor([3., 4.])])", None),
    "jagged": ("torch.nested.nested_tensor([torch.ones(1)] * 2, layout=torch.jagged)", None),
    "coo": ("torch.tensor([3., 4.]).to_sparse()", None),
    "csr": ("torch.ones(2, 2).to_sparse_csr()", None),
    "csc": ("torch.ones(2, 2).to_sparse_csc()", None),
    "bsr": ("torch.ones(2, 2).to_sparse_bsr((1, 1))", None),
    "mkldnn": ("torch.tensor([3., 4.]).to_mkldnn() if torch.backends.mkldnn.is_available() else None", None),
    "fake": ("FakeTensorMode().from_tensor(torch.ones(2))", None),
    "fake of unknown sizes": (
        "FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(2), static_shapes=False)",
        None,
    ),
    "meta": ("torch.ones(2, device='meta')", None),
    "quantized": ("torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)", None),
    "wrapper": ("TwoTensor(torch.tensor([3., 4.]), torch.tensor([3., 4.]))", None),
    "subclass": ("torch.tensor([3., 4.]).as_subclass(Sub)", [3, 4]),
    "parameter": ("torch.nn.Parameter(torch.tensor([3., 4.]))", [3, 4]),
    "uninitialized": ("torch.nn.UninitializedParameter()", None),
    "grad": ("torch.tensor([3., 4.], requires_grad=True)", [3, 4]),
    "result of grad": ("torch.tensor([3., 4.], requires_grad=True) * 1", [3, 4]),
    "freed": ("freed(torch.tensor([3., 4.]))", None),
    "freed and strided": ("freed(torch.ones(4)[::2])", None),
    "vmap": ("escaped(torch.func.vmap)", None),
    "func grad": ("escaped(torch.func.grad)", None),
    "zero": ("torch._efficientzerotensor((2,))", None),
    "functional": ("torch._to_functional_tensor(torch.ones(2))", None),
    "inference": ("inferred()", [3, 4]),
    "negated": ("torch._neg_view(torch.tensor([-3., -4.]))", [3, 4]),
    "conjugated": ("torch.tensor([3 + 4j, 5 + 6j]).conj()", None),
    "imaginary": ("torch.tensor([1 - 3j, 2 - 4j]).conj().imag", [3, 4]),
    "expanded": ("torch.tensor([3.]).expand(2)", [3, 3]),
    "list of itself": ("itself(list)", None),
    "list of itself twice": ("itself(list, 2)", None),
    "lists too deep": ("deep(100_000)", None),
    "lists that double": ("doubled(60)", None),
    "dict": ("{'a': 1}", None),
    "nothing with a shape": ("types.SimpleNamespace(shape=(2,))", None),
    "odd shape": ("types.SimpleNamespace(shape=('a',))", None),
}
BODY: Final = """
import math, sys, types, warnings
import structlog, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor
from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.errors import BatchError

warnings.simplefilter("ignore")
structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])

class Sub(torch.Tensor): ...
class Two(Inputs):
    lead: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, strided=True)
    other: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, strided=True)
class Limited(Inputs):
    lead: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", limit=9, converts=(torch.float32,))
    other: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", limit=9, converts=(torch.float32,))

def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor
def escaped(transform):
    found = []
    given = torch.ones(2, 2) if transform is torch.func.vmap else torch.ones(2)
    transform(lambda one: (found.append(one), one.sum())[1])(given)
    return found[0]
def inferred():
    with torch.inference_mode():
        return torch.tensor([3.0, 4.0])
def itself(kind, times=1):
    made = []
    made.extend([made] * times)
    return made
def deep(levels):
    made = [1.0]
    for _ in range(levels):
        made = [made]
    return made
def doubled(levels):
    made = [1.0, 2.0]
    for _ in range(levels):
        made = [made, made]
    return made

def runner_of(how, inputs):
    step = lambda view: view.lead.float() * 100 + view.other
    if how in ("eager", "no copy"):
        return EagerRunner(inputs, step, backend="cpu", no_copy=how == "no copy")
    runner = DecodeRunner(inputs, step, buckets=[1, 4], backend="cpu-capture", lowering=how)
    runner.capture()
    return runner

failed = False
def tell(*words):
    global failed
    failed = True
    print(*words, flush=True)

KINDS, hows = %r, %r
for how in hows:
    for inputs in (Two, Limited):
        runner, good = runner_of(how, inputs), {"lead": torch.tensor([5.0, 6.0]), "other": torch.tensor([1.0, 2.0])}
        for name, (text, right) in KINDS.items():
            for place in ("lead", "other"):
                for prepared in (True, False) if (inputs, place) == (Two, "other") else (True,):
                    if not prepared:
                        runner = runner_of(how, inputs)
                    else:
                        runner(good), runner(good)  # steps of that size were done, also by the short way
                        runner({key: value.clone() for key, value in good.items()})
                    bad = eval(text)
                    if bad is None:
                        continue
                    for _ in range(2):
                        try:
                            outputs = runner({**good, place: bad})
                        except BatchError as error:
                            if right is not None and inputs is Two:
                                tell(how, name, place, "refused", error)
                            if repr(place) not in str(error):
                                tell(how, name, place, "does not name the slot", error)
                        except Exception as error:
                            tell(how, name, place, "raw", type(error).__name__, error)
                        else:
                            wanted = {**{key: value.tolist() for key, value in good.items()}, place: right}
                            if right is None:
                                tell(how, name, place, "taken", outputs)
                            elif outputs.tolist() != [100 * a + b for a, b in zip(wanted["lead"], wanted["other"])]:
                                tell(how, name, place, "wrong", outputs)
                    if runner(good).tolist() != [501, 602]:
                        tell(how, name, place, "spoils the next step")
sys.exit(failed)
"""


def test_no_tensor_ends_the_process() -> None:
    """Whatever torch calls a tensor is copied right or refused by its slot's name, before and after a step like it."""
    body = BODY % (KINDS, ["foreach", "in_graph", "eager", "no copy"])
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=False, timeout=600)  # noqa: S603 - ours
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
