"""Samples and their figures as text for a terminal. What samples say cannot steer it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rolloutfleet.api.samples_view import EvaluationView, QueueView, SamplesView, SampleView, StepView
from rolloutfleet.cli.text import duration, table

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40
TEXT_LINES = 6
TOKENS = 60
"""Of a sample; of a longer one its head and its tail."""
COLOURS = (24, 94, 29, 132, 100, 61, 88, 30, 136, 96)
"""Of the 256 of terminals, by version; dark ones, under white."""
RESET = "\x1b[0m"


def as_text(view: SamplesView, *, width: int, colour: bool) -> str:
    """`width`: of the terminal. `colour`: it understands ANSI."""
    parts = [table(["FIGURE", "VALUE"], figures(view))]
    parts += [sample_text(sample, width=width, colour=colour) for sample in view.samples]
    if not view.ended and not view.steps and not view.evaluations:
        parts.append("No sample has ended yet.")
    return "\n\n".join(parts)


def figures(view: SamplesView) -> list[list[str]]:
    rates, flow, last = view.rates, view.throughput, view.steps[-1] if view.steps else None
    rewarded = [step.reward_mean for step in view.steps if step.reward_mean is not None]
    accepted = f"{_share(rates.spec_accepted)}, {_number(rates.spec_accept_length)} tokens a check"
    return [
        ["step", _step(last, view.steps)],
        ["reward", f"{_number(last.reward_mean)} ± {_number(last.reward_std)}  {sparkline(rewarded)}" if last else ""],
        ["passed", f"{_share(last.pass_rate)}, pass@n {_share(last.pass_at_n)}" if last else ""],
        ["staleness", f"mean {_number(last.staleness_mean)}, max {last.staleness_max}" if last else ""],
        [
            "throughput",
            f"{_short(flow.tokens_per_second)} tokens/s, {_short(flow.samples_per_second)} samples/s  "
            f"{sparkline(flow.series)}".rstrip(),
        ],
        ["samples", _counts(view.ended.items())],
        ["groups", f"{view.groups} finished, {_share(rates.zero_variance)} of one reward"],
        ["dropped", _counts(sorted(view.dropped.items(), key=lambda item: -item[1]))],
        ["queue", _queue(view.queue)],
        [
            "truncated",
            f"{_share(rates.truncated)}, repetitive {_share(rates.repetitive)}, failed {_share(rates.failed)}",
        ],
        ["prefix cache", f"{_share(rates.prefix_cache_hit)} hits" if rates.prefix_cache_hit is not None else ""],
        ["drafts", accepted if rates.spec_accepted is not None else ""],
        *(["evaluation", _evaluation(one)] for one in {each.name: each for each in view.evaluations}.values()),
        ["counted for", duration(view.since)],
    ]


def _evaluation(one: EvaluationView) -> str:
    failed = f", {one.failed} failed" if one.failed else ""
    return (
        f"{printable(one.name)}: reward {_number(one.reward_mean)}, passed {_share(one.pass_rate)}, "
        f"version {one.version}, {one.samples} samples{failed}, {duration(one.ago)} ago"
    )


def _queue(queue: QueueView | None) -> str:
    if queue is None:
        return ""
    waiting = f"{queue.finished} wait for a step, {queue.leased} in steps without checkpoint"
    return f"{queue.open} groups in work ({queue.running} requests), {waiting}"


def _step(last: StepView | None, steps: Sequence[StepView]) -> str:
    if last is None:
        return ""
    trained = max((step.step for step in steps if step.trained), default=None)
    return f"{last.step} from version {last.version}" + ("" if trained is None else f", trained up to {trained}")


def sparkline(values: Sequence[float], *, width: int = SPARK_WIDTH) -> str:
    """The last values between the lowest and the highest of them."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high <= low:
        return SPARKS[3] * len(shown)
    return "".join(SPARKS[min(int((value - low) / (high - low) * len(SPARKS)), len(SPARKS) - 1)] for value in shown)


def sample_text(sample: SampleView, *, width: int, colour: bool) -> str:
    epoch, group, index = sample.id.split("/")
    versions = dict.fromkeys(span.version for span in sample.weight_versions)
    trained = f", {sample.trained_tokens} trained" if sample.trained_tokens < sample.response_length else ""
    facts = [
        sample.status.value,
        f"prompt {group}, sample {index}" + (f", epoch {epoch}" if epoch != "0" else ""),
        f"reward {sample.reward:.4g}" if sample.reward is not None else "no reward",
        f"{sample.response_length} tokens{trained}",
        f"{sample.seconds:.1f}s",
        f"version {', '.join(map(str, versions))}" if versions else "",
        sample.engine,
        f"repeats itself ({_share(sample.repetition)})" if sample.repetition > 0.5 else "",
        f"dropped: {sample.dropped}" if sample.dropped else "",
        "removed" if sample.removed else "",
    ]
    lines = ["   ".join(printable(fact) for fact in facts if fact)]
    if sample.error:
        lines += _wrapped(sample.error, width)
    if sample.response:
        lines += _wrapped(sample.response, width)
    lines += _token_lines(sample, width=width, colour=colour)
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    lines = [
        line
        for paragraph in printable(text).splitlines()
        for line in textwrap.wrap(paragraph, max(width - 2, 20), initial_indent="  ", subsequent_indent="  ") or [""]
    ]
    return lines if len(lines) <= TEXT_LINES else [*lines[: TEXT_LINES - 1], "  …"]


def _token_lines(sample: SampleView, *, width: int, colour: bool) -> list[str]:
    lines, room = [""], width - 2
    for word, style in _words(sample):
        if len(word) + 1 > room and lines[-1]:
            lines.append("")
            room = width - 2
        room -= len(word) + 1
        lines[-1] += " " + (f"{style}{word}{RESET}" if colour and style else word)
    return [f" {line}" for line in lines if line]


def _words(sample: SampleView) -> Iterator[tuple[str, str]]:
    """(word, ANSI codes): ids of tokens, marks where the version changes. Tokens that are not trained are in
    parentheses, so that they are seen without colours too."""
    tokens = [
        (piece.start + offset, token, mask)
        for piece in sample.tokens
        for offset, (token, mask) in enumerate(zip(piece.ids, piece.mask, strict=True))
    ]
    if len(tokens) > TOKENS:
        tokens = tokens[: TOKENS * 2 // 3] + tokens[-TOKENS // 3 :]
    end = 0
    before: int | None = -1
    for at, token, mask in tokens:
        if at > end:
            yield f"… {at - end} …", ""
        end = at + 1
        version = next((span.version for span in sample.weight_versions if span.start <= at < span.end), None)
        if version != before:
            yield "tool" if version is None else f"v{version}", "\x1b[1m"
        before = version
        style = "" if version is None else f"\x1b[97;48;5;{COLOURS[version % len(COLOURS)]}m"
        yield (str(token), style) if mask and not sample.removed else (f"({token})", f"{style}\x1b[9m")


def printable(text: str) -> str:
    """Without what could steer a terminal: samples may say anything."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "�" for letter in text)


def _counts(found: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{printable(str(name))} {count}" for name, count in found)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _short(value: float) -> str:
    """Three digits: 12345 as 12.3k."""
    value = float(f"{value:.3g}")  # first: 999999 is 1M and not 1000k
    power = min(int(math.log10(value) // 3), 3) if value >= 1000 else 0
    return f"{value / 1000**power:.3g}{('', 'k', 'M', 'G')[power]}"
