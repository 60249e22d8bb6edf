"""A picture of a step: who computes what and what the links carry, predicted above measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from lightning_hiertrain.timeline.data import (
    OTHER,
    PHASES,
    WAITING_FOR_LINK,
    WAITING_FOR_TIER,
    RecordedStep,
    Span,
    Timeline,
    Transfer,
)
from lightning_hiertrain.timeline.summary import SMALL_BYTES, on_links, united

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_SPAN_COLOURS = {
    "forward": "#3b76af",
    "loss": "#8e5ea2",
    "backward": "#e8873a",
    "optimizer": "#3f9b4f",
    "codec": "#8c6d4f",
    "packing": "#c2a98c",
    OTHER: "#dcdcdc",
}
_TRANSFER_COLOURS = {
    "samples": "#4fb3bf",
    "activations": "#8fb8de",
    "activation gradients": "#f7c08a",
    "gradients": "#d9534f",
    "weights": "#8fce98",
    "control": "#444444",
}
_WAIT_COLOURS = {WAITING_FOR_TIER: "#9a9a9a", WAITING_FOR_LINK: "#d9534f"}
_SHORT = {"activation gradients": "act. gradients", "waiting for tier": "waiting for a tier"}
_ROW_INCHES, _MARGIN_INCHES, _WIDTH_INCHES = 0.32, 0.75, 11.0
_HIGH, _LOW, _THIN = (-0.15, 0.44), (0.25, 0.28), (0.25, 0.08)
"""Place and height of a bar in a link's row: what this step needs, the next mini-batch, small
messages."""
_FEWEST_POINTS_A_LETTER = 4.6
"""A word is written into a bar that is at least that wide."""


def draw(timeline: Timeline, step: RecordedStep) -> Figure:
    """Draws one step, and above it the predicted one if there is a prediction.

    Args:
        timeline: The timeline.
        step: One of its steps.

    Raises:
        ImportError: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`--plot` needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    spans = [s for s in timeline.spans if s.end > step.start and s.start < step.end]
    transfers = [t for t in timeline.transfers if t.arrived > step.start and t.queued < step.end]
    predicted = timeline.predicted
    rows = _rows(timeline, [*transfers, *(predicted.transfers if predicted else ())])
    panels = 1 if predicted is None else 2
    height = panels * (_ROW_INCHES * len(rows) + _MARGIN_INCHES) + 0.7
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    longest = max(step.seconds, 0.0 if predicted is None else predicted.seconds)
    scale, unit = (1.0, "s") if longest >= 2 else (1e3, "ms")
    panel = _Panel(timeline, rows, scale, 1.02 * longest)
    drawn = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    if predicted is not None:
        title = f"predicted: {scale * predicted.seconds:.4g} {unit}"
        panel.draw(drawn[0], title, predicted.spans, predicted.transfers, predicted.phases, 0.0)
        panel.end(drawn[0], predicted.seconds)
    title = f"measured, step {step.number}: {scale * step.seconds:.4g} {unit}"
    panel.draw(drawn[-1], title, spans, transfers, step.phases, step.start)
    panel.end(drawn[-1], step.seconds)
    drawn[-1].set_xlabel(f"time since the update before ({unit})")
    figure.suptitle(f"{timeline.model}: one training step", fontsize=11)
    figure.legend(
        handles=_legend(spans, transfers),
        loc="outside lower center",
        ncols=6,
        fontsize=8,
        frameon=False,
    )
    return figure


def _rows(timeline: Timeline, transfers: Iterable[Transfer]) -> list[str]:
    """Tiers with the links between them; only links that carry something are shown."""
    used = {way for t in transfers for way in timeline.crossed(t.source, t.target)}
    rows: list[str] = []
    for tier in timeline.tiers:
        for way in timeline.directions:
            lower, higher = sorted(way.split(">"), key=timeline.tiers.index)
            if way in used and higher == tier and lower in rows:
                rows.append(way)
        rows.append(tier)
    return rows


class _Panel:
    """Draws one step into axes.

    Args:
        timeline: The timeline.
        rows: Tiers and directions of links, from the top.
        scale: Units of the axis in a second.
        seconds: Length of the axis.
    """

    def __init__(self, timeline: Timeline, rows: list[str], scale: float, seconds: float) -> None:
        self._timeline = timeline
        self._place = {row: index for index, row in enumerate(rows)}
        self._scale = scale
        self._seconds = seconds
        self._points = 72 * 0.85 * _WIDTH_INCHES / seconds
        """Of width for a second, roughly."""

    def draw(
        self,
        axes: Axes,
        title: str,
        spans: Iterable[Span],
        transfers: Iterable[Transfer],
        phases: Mapping[str, float],
        start: float,
    ) -> None:
        """Draws what a step is made of."""
        axes.set_title(title, fontsize=10, loc="left", pad=14)
        axes.set_xlim(0, self._scale * self._seconds)
        axes.set_ylim(len(self._place) - 0.4, -0.6)
        axes.set_yticks(list(self._place.values()), list(self._place))
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        for row, label in zip(self._place, axes.get_yticklabels(), strict=True):
            is_tier = row in self._timeline.tiers
            label.set(fontsize=9 if is_tier else 8, fontweight="bold" if is_tier else "normal")
            if is_tier:
                place = self._place[row]
                axes.axhspan(place - 0.5, place + 0.5, color="#f5f5f5", zorder=0)
        self._draw_phases(axes, phases)
        for span in spans:
            self._draw_span(axes, span, start)
        for what in _TRANSFER_COLOURS:
            self._draw_transfers(axes, [t for t in transfers if t.what == what], what, start)

    def end(self, axes: Axes, seconds: float) -> None:
        """Marks the end of the step."""
        axes.axvline(self._scale * seconds, color="black", linewidth=1.2, zorder=5)

    def _draw_phases(self, axes: Axes, phases: Mapping[str, float]) -> None:
        now = 0.0
        for name in PHASES if phases else ():
            axes.axvline(self._scale * now, color="#555555", linewidth=0.7, linestyle=":", zorder=1)
            if self._fits(name, phases[name]):
                middle = self._scale * (now + phases[name] / 2)
                axes.text(
                    middle, -0.68, name, ha="center", va="bottom", fontsize=8, color="#555555"
                )
            now += phases[name]

    def _draw_span(self, axes: Axes, span: Span, start: float) -> None:
        place, seconds = self._place[span.tier], span.seconds
        begin, width = self._scale * max(0.0, span.start - start), self._scale * seconds
        if span.what in _WAIT_COLOURS:
            colour = _WAIT_COLOURS[span.what]
            axes.barh(place, width, left=begin, height=0.16, color=colour, alpha=0.55, zorder=2)
            return
        height = 0.8 if span.what != OTHER else 0.4
        axes.barh(place, width, left=begin, height=height, color=_SPAN_COLOURS[span.what], zorder=3)
        part = span.detail.replace("chunk ", "").replace("layers ", "")
        for words in (f"{span.what} {part}".strip(), span.what, part):
            if words and span.what != OTHER and self._fits(words, seconds):
                self._write(axes, begin + width / 2, place, words, "white")
                break

    def _draw_transfers(
        self, axes: Axes, transfers: list[Transfer], what: str, start: float
    ) -> None:
        stretches: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for transfer in transfers:
            small = transfer.num_bytes < SMALL_BYTES
            for way, since, until in on_links(self._timeline, transfer):
                stretches.setdefault((way, small), []).append((since - start, until - start))
        for (way, small), found in stretches.items():
            # Chunks are drawn apart, layers in one.
            apart = what in ("activations", "activation gradients")
            for number, (begin, end) in enumerate(sorted(found) if apart else united(found)):
                place, height = _THIN if small else _LOW if what == "samples" else _HIGH
                self._bar(axes, self._place[way] + place, begin, end, height, what)
                words = _SHORT.get(what, what)
                numbered = f"{words} {number + 1}" if apart and len(found) > 1 else words
                if not small:
                    self._label(axes, self._place[way] + place, begin, end, (numbered, words))

    def _bar(
        self, axes: Axes, place: float, begin: float, end: float, height: float, what: str
    ) -> None:
        begin, end = max(0.0, begin), min(end, self._seconds)
        if end > begin:
            axes.barh(
                place,
                self._scale * (end - begin),
                left=self._scale * begin,
                height=height,
                color=_TRANSFER_COLOURS[what],
                edgecolor="white",
                linewidth=0.4,
                zorder=3,
            )

    def _label(
        self, axes: Axes, place: float, begin: float, end: float, choices: Iterable[str]
    ) -> None:
        begin, end = max(0.0, begin), min(end, self._seconds)
        words = next((words for words in choices if self._fits(words, end - begin)), None)
        if words is not None:
            self._write(axes, self._scale * (begin + end) / 2, place, words, "black")

    def _fits(self, words: str, seconds: float) -> bool:
        return seconds * self._points >= _FEWEST_POINTS_A_LETTER * len(words)

    @staticmethod
    def _write(axes: Axes, x: float, y: float, words: str, colour: str) -> None:
        axes.text(
            x,
            y,
            words,
            ha="center",
            va="center",
            fontsize=7.5,
            color=colour,
            zorder=6,
            clip_on=True,
        )


def _legend(spans: Iterable[Span], transfers: Iterable[Transfer]) -> list[Patch]:
    from matplotlib.patches import Patch

    shown = {span.what for span in spans} | {transfer.what for transfer in transfers}
    colours = {**_SPAN_COLOURS, **_WAIT_COLOURS, **_TRANSFER_COLOURS}
    return [
        Patch(color=colour, label=_SHORT.get(what, what))
        for what, colour in colours.items()
        if what in shown
    ]
