"""The training loop: one process or many, from the first step or from the last saved state.

accelerate starts the processes, distributes and casts. The loop itself is ours, because a run that is resumed or
distributed must read exactly the batches of a single uninterrupted process (`data.batch`).
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.source.hugging_face import without_bars
from deadweight.source.printable import printable
from deadweight.train.data import Corpus, batch, prepare, windows
from deadweight.train.fast_gelu import with_fast_gelu
from deadweight.train.launch import DATA, begin_out, finished_run, make_accelerator
from deadweight.train.masking import hide_tokens
from deadweight.train.memory import check_memory
from deadweight.train.objective import Objective, language_model, precision_of
from deadweight.train.optimizer import make_optimizer, set_learning_rate
from deadweight.train.result import Listener, Metrics, Trained, Update, write_result
from deadweight.train.schedule import learning_rate
from deadweight.train.settings import Run
from deadweight.train.state import load_state, save_state, saved_step, saved_text, whole_weights
from deadweight.train.tokenizer import save_tokenizer

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped,unused-ignore]
    from torch.utils.hooks import RemovableHandle
    from torch.utils.tensorboard import SummaryWriter

LOGITS = 1 << 28  # at most, per forward pass of an evaluation, which should not need more memory than a training step


def train(
    run: Run, out: str | Path, *, overwrite: bool = False, cache: Path | None = None, listener: Listener | None = None
) -> Trained:
    """Train a model and write it to OUT. A run that was stopped resumes from its last checkpoint; one that is finished
    is left as it is.

    Started by torchrun or `accelerate launch`, the processes share the batch, and the losses are those of one process.
    `cache` is the folder of the tokens; by default they lie in OUT.
    """
    folder, listener = Path(out).expanduser(), listener or Listener()
    if (finished := finished_run(folder, run, overwrite=overwrite)) is not None:
        return finished
    accelerator = make_accelerator()
    main, new = accelerator.is_main_process, not folder.exists()
    check_memory(run, accelerator)
    context = run.shape().context
    try:
        with accelerator.main_process_first():
            corpus = prepare(run.data, cache or folder / DATA, context=context, progress=listener.progress)
    except DeadweightError:
        if main and new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if main:
        begin_out(folder, run, overwrite=overwrite)
    accelerator.wait_for_everyone()
    return Trainer(run, folder, corpus, accelerator, listener).run_all()


class Trainer:
    """One run: its model, its optimizer and its step."""

    def __init__(self, run: Run, out: Path, corpus: Corpus, accelerator: Accelerator, listener: Listener) -> None:
        self.settings, self.out, self.corpus, self.accelerator = run.train, out, corpus, accelerator
        self.listener = listener
        self.config = run.config(corpus.vocabulary)
        device = accelerator.device
        if run.train.batch % accelerator.num_processes:
            raise DeadweightError(
                f"found batch = {run.train.batch}; expected a multiple of the {accelerator.num_processes} processes"
            )
        torch.manual_seed(run.train.seed)
        model = language_model(self.config).to(device).train()
        self.parameters = model.num_parameters()
        self.precision = precision_of(run.train, device)
        compiled = device.type == "cuda" if run.train.compile is None else run.train.compile
        if compiled and device.type == "cuda" and self.precision == torch.bfloat16:
            with_fast_gelu(model)
        optimizer = make_optimizer(model, run.train, device)
        self.objective, self.optimizer = accelerator.prepare(Objective(model, self.precision), optimizer)
        self.loss: Callable[[Tensor], Tensor] = torch.compile(self.objective) if compiled else self.objective
        self.expect_same_text()
        self.step = load_state(out, self.objective, self.own_optimizer)
        if self.step:
            listener.progress(f"resuming at step {self.step}")
        self.metrics = Metrics(out / "metrics.jsonl", self.step) if accelerator.is_main_process else None
        self.board = tensorboard(out) if run.train.tensorboard and accelerator.is_main_process else None
        self.begin = time.perf_counter()

    def expect_same_text(self) -> None:
        """A run resumes only with the text that it began with."""
        if (before := saved_text(self.out)) is not None and before != self.corpus.folder.name:
            raise DeadweightError(
                f"found another text than the one {printable(self.out)} was trained on up to step "
                f"{saved_step(self.out)}; expected the same text, another folder, or --overwrite to start again"
            )

    def run_all(self) -> Trained:
        train, first = self.settings, self.step
        losses, since, last = [], time.perf_counter(), self.step
        while self.step < train.steps:
            losses.append(self.one_step())
            self.step += 1
            if self.step % train.log_every == 0 or self.step == train.steps:
                self.log(losses, (self.step - last) * self.tokens_per_step / (time.perf_counter() - since))
                losses, since, last = [], time.perf_counter(), self.step
            if self.step % train.evaluate_every == 0 and self.step < train.steps:
                self.evaluate(train.evaluate_tokens)
            if self.step % train.save_every == 0 and self.step < train.steps:
                self.finite([*losses, self.next_loss()])
                self.save_state()
            if self.step % train.evaluate_every == 0 or self.step % train.save_every == 0:
                since, last = time.perf_counter(), self.step
        seconds = time.perf_counter() - self.begin
        valid_loss, bits = self.evaluate(None)
        if self.board is not None:
            self.board.close()
        trained = self.step * self.tokens_per_step
        speed = (self.step - first) * self.tokens_per_step / max(seconds, 1e-9)
        seen = self.corpus.train_bytes, self.corpus.train_sha256
        result = Trained(self.out, self.parameters, self.step, trained, seconds, valid_loss, bits, speed, *seen)
        self.save_model(result)
        return result

    @property
    def tokens_per_step(self) -> int:
        return self.settings.batch * self.settings.accumulate * self.config.context

    def one_step(self) -> Tensor:
        """Forward and backward over the micro-batches, clip, update; the loss stays on the device."""
        train, accelerator = self.settings, self.accelerator
        set_learning_rate(self.optimizer, learning_rate(train, self.step))
        total = torch.zeros((), device=accelerator.device)
        for micro in range(train.accumulate):
            tokens = self.micro_batch(micro)
            with accelerator.no_sync(self.objective) if micro + 1 < train.accumulate else nullcontext():
                loss = self.loss(tokens) / train.accumulate
                accelerator.backward(loss)
            total += loss.detach()
        accelerator.clip_grad_norm_(self.objective.parameters(), train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def micro_batch(self, micro: int) -> Tensor:
        """This process's share of the sequences of a micro-batch."""
        train, accelerator = self.settings, self.accelerator
        number = self.step * train.accumulate + micro
        drawn = batch(self.corpus.train, number, train.seed, train.batch, self.config.context)
        if not self.config.causal:
            drawn = hide_tokens(drawn, self.config.vocab_size, train.seed, number)
        mine = drawn.chunk(accelerator.num_processes)[accelerator.process_index]
        if accelerator.device.type == "cuda":
            mine = mine.pin_memory()
        return mine.to(accelerator.device, non_blocking=True)

    @torch.no_grad()
    def next_loss(self) -> Tensor:
        """The loss on the next batch: a state is only worth saving if it is finite."""
        return self.objective(self.micro_batch(0)).detach()

    def finite(self, losses: list[Tensor]) -> list[float]:
        """The losses as numbers; an error if a loss or a weight is NaN or infinite, before anything is saved."""
        values = self.accelerator.reduce(torch.stack(losses), "mean").tolist() if losses else []
        bad = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
        model = self.accelerator.unwrap_model(self.objective).model
        broken = [n for n, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
        if bad is not None or broken:
            raise DeadweightError(self.not_finite(values, bad, broken))
        return values

    def not_finite(self, values: list[float], bad: int | None, broken: list[str]) -> str:
        """The message: at which step, in which module first, and which checkpoint is left."""
        step = self.step if bad is None else min(self.step, self.step - len(values) + bad + 1)
        what = "a weight is NaN or infinite" if bad is None else f"the loss is {values[bad]}"
        first = broken[0] if broken else self.first_not_finite()
        where = f", first in {first}" if first else ""
        kept = saved_step(self.out)
        left = "no checkpoint was saved yet" if kept is None else f"the checkpoint of step {kept} is kept"
        return (
            f"{what} at step {step}{where}; {left} in {printable(self.out)}. A lower learning rate, a longer "
            "warm-up or more weight decay may help"
        )

    @torch.no_grad()
    def first_not_finite(self) -> str | None:
        """The first module with NaN or infinity in its output."""
        names: list[str] = []
        model = self.accelerator.unwrap_model(self.objective).model

        def watch(name: str, module: nn.Module) -> RemovableHandle:
            def hook(_: nn.Module, __: object, output: object) -> None:
                if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                    names.append(name)

            return module.register_forward_hook(hook)

        hooks = [watch(n, m) for n, m in model.named_modules() if n]
        self.next_loss()
        for handle in hooks:
            handle.remove()
        return names[0] if names else None

    def log(self, losses: list[Tensor], speed: float) -> None:
        values = self.finite(losses)
        self.record(
            Update(
                self.step,
                self.step * self.tokens_per_step,
                time.perf_counter() - self.begin,
                loss=sum(values) / len(values),
                learning_rate=learning_rate(self.settings, self.step - 1),
                tokens_per_second=speed,
            )
        )

    def record(self, update: Update) -> None:
        """To metrics.jsonl, to the listener, and to tensorboard."""
        if self.metrics is not None:
            self.metrics.add(update)
            self.listener.tell(update)
        if self.board is not None:
            for name, value in asdict(update).items():
                if value is not None and name != "step":
                    self.board.add_scalar(name, value, update.step)

    @torch.no_grad()
    def evaluate(self, limit: int | None) -> tuple[float, float]:
        """The mean loss on the validation text, and bits per byte of it; for an encoder, of its masked tokens."""
        context, accelerator = self.config.context, self.accelerator
        every = windows(self.corpus.valid, context, limit)
        if not self.config.causal:
            every = hide_tokens(every, self.config.vocab_size, seed=0, step=0)
        mine = every[accelerator.process_index :: accelerator.num_processes]
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        objective = accelerator.unwrap_model(self.objective) if accelerator.num_processes == 1 else self.objective
        fitting = LOGITS // (context * self.config.vocab_size)
        rows = max(1, min(fitting, self.settings.batch // accelerator.num_processes))
        most = math.ceil(len(every) / accelerator.num_processes / rows)
        for part in range(most):  # every process makes as many calls, since sharded weights are gathered in each
            tokens = mine[part * rows : (part + 1) * rows]
            counts = len(tokens)
            tokens = (tokens if counts else every[:1]).to(accelerator.device)
            loss = objective(tokens).double()
            sums += torch.stack([loss * counts, torch.tensor(float(counts), device=loss.device, dtype=loss.dtype)])
        sums = accelerator.reduce(sums, "sum")
        loss = float(sums[0] / sums[1])
        bits = loss / math.log(2) / self.corpus.bytes_per_token
        self.record(
            Update(
                self.step,
                self.step * self.tokens_per_step,
                time.perf_counter() - self.begin,
                valid_loss=loss,
                bits_per_byte=bits,
            )
        )
        return loss, bits

    def save_state(self) -> None:
        main, text = self.accelerator.is_main_process, self.corpus.folder.name
        save_state(self.out, self.objective, self.own_optimizer, self.step, main=main, text=text)
        self.accelerator.wait_for_everyone()

    @property
    def own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def save_model(self, result: Trained) -> None:
        """The model as Hugging Face reads it, with its tokenizer, in OUT itself; the result marks the run finished."""
        weights = whole_weights(self.objective)
        if self.accelerator.is_main_process:
            model = language_model(self.config)
            model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
            with without_bars():
                model.save_pretrained(str(self.out))
            save_tokenizer(self.corpus, self.config.context, self.out)
            write_result(result)
        self.accelerator.wait_for_everyone()


def tensorboard(out: Path) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise DeadweightError("tensorboard = true needs tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(out / "tensorboard"))
