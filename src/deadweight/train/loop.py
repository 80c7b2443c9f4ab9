"""The training loop: one process or many, from the beginning or from where it was stopped."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deadweight.errors import DeadweightError
from deadweight.progress import Progress, silent
from deadweight.source.hugging import without_bars
from deadweight.source.text import printable
from deadweight.train.data import Corpus, batch, prepare, windows
from deadweight.train.fast_gelu import with_fast_gelu
from deadweight.train.launch import DATA, begin_out, make_accelerator, refuse_out
from deadweight.train.objective import Objective
from deadweight.train.result import Metrics, Trained, Update
from deadweight.train.schedule import learning_rate
from deadweight.train.settings import Run, Train
from deadweight.train.state import load_state, save_state, saved_step, saved_text, whole_weights
from deadweight.train.tokenizer import save_tokenizer
from deadweight.transformer import TransformerForCausalLM

LOGITS = 1 << 28  # at most, at a time, in evaluations: they should not need more memory than a step of training
Tell = Callable[[Update], None]


def train(
    run: Run,
    out: str | Path,
    *,
    overwrite: bool = False,
    cache: Path | None = None,
    tell: Tell = lambda _: None,
    say: Progress = silent,
) -> Trained:
    """Train a model and write it to OUT. A run that was stopped goes on where its last checkpoint was.

    Started by torchrun or `accelerate launch`, the processes share the batch and give the losses of one.
    """
    folder = Path(out).expanduser()
    accelerator = make_accelerator()
    main, new = accelerator.is_main_process, not folder.exists()
    if main:
        refuse_out(folder, run, overwrite=overwrite)
    context = run.config(run.model.get("vocab_size") or 1 << 30).context
    try:
        with accelerator.main_process_first():
            corpus = prepare(run.data, cache or folder / DATA, context=context, say=say)
    except DeadweightError:
        if main and new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if main:
        begin_out(folder, run, overwrite=overwrite)
    accelerator.wait_for_everyone()
    return Trainer(run, folder, corpus, accelerator, tell, say).run_all()


class Trainer:
    """One run: its model, its optimizer and where it stands."""

    def __init__(self, run: Run, out: Path, corpus: Corpus, accelerator: Any, tell: Tell, say: Progress) -> None:
        self.settings, self.out, self.corpus, self.accelerator = run.train, out, corpus, accelerator
        self.tell, self.say = tell, say
        self.config = run.config(corpus.vocabulary)
        if not self.config.causal:
            raise DeadweightError("found causal = false; expected a decoder: encoders can be built, not yet trained")
        device = accelerator.device
        if run.train.batch % accelerator.num_processes:
            raise DeadweightError(
                f"found batch = {run.train.batch} for {accelerator.num_processes} processes; expected a multiple"
            )
        torch.manual_seed(run.train.seed)
        model = TransformerForCausalLM(self.config).to(device).train()
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
            say(f"going on at step {self.step}")
        self.metrics = Metrics(out / "metrics.jsonl", self.step) if accelerator.is_main_process else None
        self.board = tensorboard(out) if run.train.tensorboard and accelerator.is_main_process else None
        self.begin = time.perf_counter()

    def expect_same_text(self) -> None:
        """A run goes on with the text that it began with, or not at all."""
        if (before := saved_text(self.out)) is not None and before != self.corpus.folder.name:
            raise DeadweightError(
                f"the text is not the one that {printable(self.out)} was trained on up to step {saved_step(self.out)}; "
                "expected the same: name another folder, or begin anew with --overwrite"
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
        self.save_model()
        if self.board is not None:
            self.board.close()
        trained = self.step * self.tokens_per_step
        speed = (self.step - first) * self.tokens_per_step / max(seconds, 1e-9)
        return Trained(self.out, self.parameters, self.step, trained, seconds, valid_loss, bits, speed)

    @property
    def tokens_per_step(self) -> int:
        return self.settings.batch * self.settings.accumulate * self.config.context

    def one_step(self) -> Tensor:
        """Forward and backward over the micro-batches, clip, update; the loss stays on the device."""
        train, accelerator = self.settings, self.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(train, self.step)
        total = torch.zeros((), device=accelerator.device)
        for micro in range(train.accumulate):
            tokens = self.micro_batch(micro)
            with accelerator.no_sync(self.objective) if micro + 1 < train.accumulate else nothing():
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
        drawn = batch(
            self.corpus.train, self.step * train.accumulate + micro, train.seed, train.batch, self.config.context
        )
        mine = drawn.chunk(accelerator.num_processes)[accelerator.process_index]
        if accelerator.device.type == "cuda":
            mine = mine.pin_memory()
        return mine.to(accelerator.device, non_blocking=True)

    @torch.no_grad()
    def next_loss(self) -> Tensor:
        """What the weights give on text they have not seen yet: a state is worth keeping if that is finite."""
        return self.objective(self.micro_batch(0)).detach()

    def finite(self, losses: list[Tensor]) -> list[float]:
        """The last losses; a run whose losses or weights are not finite ends here, before it is saved or told."""
        values = self.accelerator.reduce(torch.stack(losses), "mean").tolist() if losses else []
        bad = next((i for i, v in enumerate(values) if not math.isfinite(v)), None)
        model = self.accelerator.unwrap_model(self.objective).model
        broken = [n for n, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
        if bad is not None or broken:
            raise DeadweightError(self.not_finite(values, bad, broken))
        return values

    def not_finite(self, values: list[float], bad: int | None, broken: list[str]) -> str:
        """Where the first number that is not finite stands, and what is left of the run."""
        step = self.step if bad is None else min(self.step, self.step - len(values) + bad + 1)
        what = "the weights are not finite" if bad is None else f"the loss is {values[bad]}"
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
        """The first module whose output is not finite."""
        names: list[str] = []
        model = self.accelerator.unwrap_model(self.objective).model

        def watch(name: str) -> Any:
            def hook(_: Any, __: Any, output: Any) -> None:
                if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                    names.append(name)

            return hook

        hooks = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n]
        self.next_loss()
        for handle in hooks:
            handle.remove()
        return names[0] if names else None

    def log(self, losses: list[Tensor], speed: float) -> None:
        values = self.finite(losses)
        self.told(
            Update(
                self.step,
                self.step * self.tokens_per_step,
                time.perf_counter() - self.begin,
                loss=sum(values) / len(values),
                learning_rate=learning_rate(self.settings, self.step - 1),
                tokens_per_second=speed,
            )
        )

    def told(self, update: Update) -> None:
        if self.metrics is not None:
            self.metrics.add(update)
            self.tell(update)
        if self.board is not None:
            for name, value in asdict(update).items():
                if value is not None and name != "step":
                    self.board.add_scalar(name, value, update.step)

    @torch.no_grad()
    def evaluate(self, limit: int | None) -> tuple[float, float]:
        """The mean loss on the validation text, and bits per byte of it."""
        context, accelerator = self.config.context, self.accelerator
        every = windows(self.corpus.valid, context, limit)
        mine = every[accelerator.process_index :: accelerator.num_processes]
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        objective = accelerator.unwrap_model(self.objective) if accelerator.num_processes == 1 else self.objective
        fitting = LOGITS // (context * self.config.vocab_size)
        rows = max(1, min(fitting, self.settings.batch // accelerator.num_processes))
        most = math.ceil(len(every) / accelerator.num_processes / rows)
        for part in range(most):  # every process calls as often: sharded weights are gathered together
            tokens = mine[part * rows : (part + 1) * rows]
            counts = len(tokens)
            tokens = (tokens if counts else every[:1]).to(accelerator.device)
            loss = objective(tokens).double()
            sums += torch.stack([loss * counts, torch.tensor(float(counts), device=loss.device, dtype=loss.dtype)])
        sums = accelerator.reduce(sums, "sum")
        loss = float(sums[0] / sums[1])
        bits = loss / math.log(2) / self.corpus.bytes_per_token
        self.told(
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
        """Without accelerate's wrapping."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def save_model(self) -> None:
        """The model as Hugging Face reads it, with its tokenizer, in OUT itself."""
        weights = whole_weights(self.objective)
        if self.accelerator.is_main_process:
            model = TransformerForCausalLM(self.config)
            model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
            with without_bars():
                model.save_pretrained(str(self.out))
            save_tokenizer(self.corpus, self.config.context, self.out)
        self.accelerator.wait_for_everyone()


class nothing:
    """A context manager that does nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def precision_of(train: Train, device: torch.device) -> torch.dtype:
    wanted = train.precision if train.precision != "auto" else "bf16" if device.type == "cuda" else "fp32"
    return torch.bfloat16 if wanted == "bf16" else torch.float32


def make_optimizer(model: nn.Module, train: Train, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; matrices and tables decay, vectors do not."""
    own = list(model.parameters())
    groups = [
        {"params": [p for p in own if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in own if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (train.beta1, train.beta2)
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=train.learning_rate, betas=betas, fused=device.type == "cuda"
    )


def tensorboard(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise DeadweightError("tensorboard = true needs it: pip install tensorboard") from error
    return SummaryWriter(str(out / "tensorboard"))
