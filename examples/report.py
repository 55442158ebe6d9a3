"""What the training example shows, and what it checks: progress, the closing table, the verdict.

Nothing here knows how a step was computed. A run hands in a `Result`; `closing_table` sets two of them side
by side, and `verdict` holds them against the example's promises:

    the losses of the split and the unsplit run agree over the first `CURVE_STEPS` steps, to
    `CURVE_TOLERANCE` of the dtype. Later the two may drift apart: sums are added in another order when they
    are split, and training amplifies the last digit's rounding from step to step. Over the whole run the
    difference is shown and not judged;

    at the default number of steps: held-out accuracy at least `MIN_ACCURACY`, and that of digits on the
    seam within `MAX_SEAM_GAP` of the others';

    with `--no-halo`: the seam's accuracy is at least `MIN_SEAM_LOSS` below the unsplit run's, and the other
    digits' is not, which shows that it is the halo that reads the digits on the seam.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

from finder import Score
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

CURVE_STEPS = 50
CURVE_TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
MIN_ACCURACY = 0.90
MAX_SEAM_GAP = 0.02
MIN_SEAM_LOSS = 0.10
MIB = 1024 * 1024


@dataclass
class Result:
    """One run. `peak_bytes` has one entry per rank, above the level before the model was built;
    `train_seconds` excludes evaluation; `exchange_seconds` is rank 0's time between posting messages and
    having them, and the counters after it are rank 0's too."""

    title: str
    ranks: int
    losses: list[float] = field(default_factory=list)
    score: Score = field(default_factory=Score)
    images: int = 0
    train_seconds: float = 0.0
    total_seconds: float = 0.0
    exchange_seconds: float = 0.0
    messages: int = 0
    message_bytes: int = 0
    all_reduces: int = 0
    gradient_bytes: int = 0
    peak_bytes: list[int] = field(default_factory=list)

    @property
    def images_per_second(self) -> float:
        return self.images / self.train_seconds if self.train_seconds else 0.0

    @property
    def exchange_share(self) -> float:
        return self.exchange_seconds / self.train_seconds if self.train_seconds else 0.0

    def as_json(self) -> dict:
        score = {name: getattr(self.score, name) for name in ("all", "seam", "rest", "background")}
        return {
            **asdict(self),
            "images_per_second": self.images_per_second,
            "exchange_share": self.exchange_share,
            # JSON has no nan: an accuracy that was not measured is null.
            "accuracy": {name: None if math.isnan(value) else value for name, value in score.items()},
        }


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def loss_difference(a: Result, b: Result, steps: int | None = None) -> float:
    """The largest relative difference of two loss curves, over their first `steps` common steps."""
    pairs = list(zip(a.losses, b.losses, strict=False))[:steps]
    return max((abs(x - y) / abs(y) for x, y in pairs), default=float("nan"))


class Display:
    """Progress of one run on rank 0, as a bar on a terminal and as lines elsewhere; silent on other ranks."""

    def __init__(self, result: Result, steps: int, *, shown: bool, line_every: int):
        self.result, self.shown, self.line_every = result, shown, line_every
        self.console = Console()
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[facts]}"),
            console=self.console,
            disable=not (shown and self.console.is_terminal),
        )
        self.task = self.bar.add_task(result.title, total=steps, facts="")

    def __enter__(self) -> Display:
        if self.shown:
            self.console.print(f"\n[bold]{self.result.title}[/bold]")
        self.bar.start()
        return self

    def __exit__(self, *error) -> None:
        self.bar.stop()

    def step(self, peak_bytes: int) -> None:
        """After a training step: `result` already has it."""
        if not self.shown:
            return
        result, done = self.result, len(self.result.losses)
        facts = (
            f"loss {result.losses[-1]:.4f}  found {percent(result.score.all)}, on the seam "
            f"{percent(result.score.seam)}  {result.images_per_second:.1f} images/s  "
            f"peak {peak_bytes / MIB:.0f} MiB  exchange {percent(result.exchange_share)}"
        )
        self.bar.update(self.task, completed=done, facts=facts)
        if not self.console.is_terminal and done % self.line_every == 0:
            self.console.print(f"step {done:4d}  {facts}", soft_wrap=True)


def closing_table(split: Result, unsplit: Result) -> Table:
    table = Table(title="Split and unsplit, same seed", title_justify="left")
    table.add_column("")
    table.add_column(split.title, justify="right")
    table.add_column(unsplit.title, justify="right")

    def row(name, show):
        table.add_row(name, show(split), show(unsplit))

    row("steps", lambda r: str(len(r.losses)))
    row("last loss", lambda r: f"{r.losses[-1]:.4f}")
    row("digits found", lambda r: f"{percent(r.score.all)} of {r.score.seam_digits + r.score.rest_digits}")
    row("  on the seam", lambda r: f"{percent(r.score.seam)} of {r.score.seam_digits}")
    row("  elsewhere", lambda r: f"{percent(r.score.rest)} of {r.score.rest_digits}")
    row("background left alone", lambda r: percent(r.score.background))
    row("training", lambda r: f"{r.train_seconds:.1f} s, {r.images_per_second:.1f} images/s")
    row("with evaluation", lambda r: f"{r.total_seconds:.1f} s")
    row("time in exchanges", lambda r: percent(r.exchange_share))
    row("halos sent per step", lambda r: _traffic(r, r.message_bytes, r.messages))
    row("gradients summed", lambda r: _traffic(r, r.gradient_bytes, r.all_reduces))
    row("peak memory per rank", lambda r: ", ".join(f"{peak / MIB:.0f}" for peak in r.peak_bytes) + " MiB")
    for steps, name in (
        (CURVE_STEPS, f"loss gap, {CURVE_STEPS} steps"),
        (None, "over all steps"),
    ):
        table.add_row(name, f"{loss_difference(split, unsplit, steps):.1e}", "")
    return table


def _traffic(result: Result, sent_bytes: int, calls: int) -> str:
    steps = max(1, len(result.losses))
    return f"{sent_bytes / steps / MIB:.2f} MiB in {calls / steps:.0f}" if calls else "-"


def verdict(
    split: Result, unsplit: Result, *, dtype: str, no_halo: bool, targets: bool
) -> list[tuple[bool, str]]:
    """Each promise that applies, and whether it was kept."""
    checks = []
    if not no_halo:
        tolerance = CURVE_TOLERANCE[dtype]
        difference = loss_difference(split, unsplit, CURVE_STEPS)
        steps = min(CURVE_STEPS, len(split.losses), len(unsplit.losses))
        checks.append(
            (difference <= tolerance, f"{steps} losses differ by {difference:.1e}, at most {tolerance:.0e}")
        )
    if not targets:
        return checks

    score, reference = split.score, unsplit.score
    least = f"at least {percent(MIN_ACCURACY)}"
    if no_halo:
        lost = reference.seam - score.seam
        checks.append(
            (lost >= MIN_SEAM_LOSS, f"without halos the seam loses {100 * lost:.1f} points, at least 10")
        )
        elsewhere = reference.rest - score.rest
        checks.append(
            (
                elsewhere < MIN_SEAM_LOSS / 2,
                f"other digits lose {100 * elsewhere:.1f} points, less than half of that",
            )
        )
        return checks
    checks.append((score.all >= MIN_ACCURACY, f"{percent(score.all)} of held-out digits found, {least}"))
    if score.seam_digits:
        gap = score.rest - score.seam
        checks.append(
            (gap <= MAX_SEAM_GAP, f"the seam is {100 * gap:+.1f} points behind the rest, at most 2")
        )
    return checks
