"""Shared by all adapters: read a job, run the tool, and write outputs, files and a report.

An adapter runs in the environment of its tool, so this file needs nothing but torch and safetensors.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)


class NotSupported(Exception):
    """The tool or its documentation says that it does not support this model."""


@dataclass
class Job:
    """One tool, one model, one precision; what the adapter finds out is collected here."""

    model: Path  # a Hugging Face folder; or, for a net of our own, a folder with model.safetensors
    out: Path  # `out/result` is for the files of the result
    inputs: Path
    kind: str  # causal, encoder or conv
    dtype: torch.dtype
    variant: str
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def result(self) -> Path:
        return self.out / "result"

    def read_inputs(self) -> Tensor:
        tensor = load_file(self.inputs)["inputs"]
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    @contextmanager
    def timed(self) -> Iterator[None]:
        """The work of the tool: from the original's files to those of the result, or to its model if it writes none."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def serve(work: Callable[[Job], dict[str, Tensor]], packages: tuple[str, ...]) -> None:
    """Do the job named on the command line. `work` returns outputs: `output`, and where it has one a `control`."""
    given: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dtype = getattr(torch, given["dtype"])
    places = {name: Path(given[name]) for name in ("model", "out", "inputs")}
    job = Job(**places, kind=given["kind"], dtype=dtype, variant=given["variant"])
    report: dict[str, Any] = {"status": "done", "why": ""}
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            outputs = work(job)
        save_file({n: t.detach().contiguous() for n, t in outputs.items()}, job.out / "outputs.safetensors")
    except NotSupported as reason:
        report |= {"status": "not supported", "why": str(reason)}
    except Exception as error:  # noqa: BLE001 - that a tool fails is a result
        traceback.print_exc()
        report |= {"status": "failed", "why": f"{type(error).__name__}: {first_line(error)}"}
    report |= {"peak_bytes": peak_bytes(), "seconds": job.seconds, "notes": job.notes, "versions": versions(packages)}
    (job.out / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


def peak_bytes() -> int:
    """The largest resident set of this process. getrusage would count the process that started it too."""
    status = Path("/proc/self/status")
    if status.is_file():
        lines = status.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    by_name = {}
    for name in ("torch", "transformers", *packages):
        try:
            by_name[name] = version(name).split("+")[0]
        except PackageNotFoundError:
            continue
    return by_name


def hugging_class(kind: str) -> Any:
    import transformers

    return {"causal": transformers.AutoModelForCausalLM, "encoder": transformers.AutoModel}[kind]


def load_hugging(job: Job, folder: Path) -> nn.Module:
    """The model in a folder, as plain transformers reads it."""
    return hugging_class(job.kind).from_pretrained(folder, dtype=job.dtype).eval()


class Full(TorchDispatchMode):
    """Keep all operations in float64: RMSNorm, softmax and rotary positions in transformers cast to float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if func.overloadpacket in PRODUCTS:  # a buffer that was kept in float32 meets what was not rounded
            args = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        return func(*args, **kwargs)


def full_precision(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return Full() if dtype is torch.float64 else nullcontext()


def run_hugging(module: nn.Module, inputs: Tensor) -> Tensor:
    """Logits of a language model; the last hidden state of an encoder."""
    with full_precision(next(p.dtype for p in module.parameters() if p.is_floating_point())):
        output = module(input_ids=inputs)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def save_state(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write tensors to a file, for tools that write none; shared tensors are stored once."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, tensor in tensors.items():
        if (key := (tensor.data_ptr(), tensor.shape)) not in seen:
            seen.add(key)
            kept[name] = tensor.detach().clone().contiguous()
    save_file(kept, folder / "model.safetensors")
