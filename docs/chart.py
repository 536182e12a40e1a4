"""The chart of measured speed of the README, made from the results of benchmarks.

    python docs/chart.py        writes docs/images/speed.svg
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "docs" / "images" / "speed.svg"
TASKS = {
    "sft-1.24b-64-2026-11-15": "fine-tuning a Llama of 1.24B, texts of mixed length",
    "sft-0.5b-64-2026-11-15": "fine-tuning a model of 0.5B with 151,936 tokens",
    "bert-base-32-2026-11-15": "classification with BERT-base",
    "t5-large-64-2026-11-15": "sequence to sequence with T5-v1.1-large",
}
ARMS = {
    "ours": "loopwright",
    "transformers": "transformers",
    "transformers-wide": "transformers, Liger's kernels, grouped by length",
}
LEFT, BAR, GAP, WIDTH, SCALE = 10, 18, 14, 820, 30
"""Sizes in pixels; SCALE are the pixels for the speed of transformers' Trainer."""
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .task, .title { font-weight: 600; } .title { font-size: 15px; } .note { fill: #59636e; }
  .ours { fill: #0f766e; } .other { fill: #a8b1bb; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .note { fill: #9198a1; } .ours { fill: #2dd4bf; } .other { fill: #59636e; }
  }
"""


def speeds(name: str) -> dict[str, float]:
    """Useful tokens per second of each arm of a benchmark that is shown."""
    results = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["results"]
    return {arm: results[arm]["tokens_per_s"] for arm in ARMS if results.get(arm, {}).get("status") == "ok"}


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'  <text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(words)}</text>'


def bar(y: int, arm: str, ratio: float, tokens: float) -> list[str]:
    width = ratio * SCALE
    kind = "ours" if arm == "ours" else "other"
    times = "" if arm == "transformers" else f"{ratio:.1f} times, "
    words = f"{ARMS[arm]}: {times}{tokens:,.0f} tokens/s"
    return [
        f'  <rect x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR}" rx="3" class="{kind}"/>',
        text(LEFT + width + 8, y + 14, words),
    ]


def chart() -> str:
    lines = [text(LEFT, 24, "Useful tokens per second on one H200, default arguments", "title")]
    y = 40
    for name, words in TASKS.items():
        found = speeds(name)
        lines.append(text(LEFT, y + 16, words, "task"))
        y += 24
        for arm, tokens in found.items():
            lines += bar(y, arm, tokens / found["transformers"], tokens)
            y += BAR + 4
        y += GAP
    lines.append(text(LEFT, y + 8, "How it was measured, and where it is not faster: docs/performance.md", "note"))
    size = f'width="{WIDTH}" height="{y + 20}" viewBox="0 0 {WIDTH} {y + 20}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label()}">'
    return "\n".join([head, f"  <style>{STYLE}  </style>", *lines, "</svg>"]) + "\n"


def label() -> str:
    """The chart in words, for readers who cannot see it."""
    found = {words: speeds(name) for name, words in TASKS.items()}
    ratios = [f"{words}: {each['ours'] / each['transformers']:.1f} times" for words, each in found.items()]
    return escape("Speed of loopwright relative to transformers' Trainer: " + "; ".join(ratios), quote=True)


if __name__ == "__main__":
    CHART.write_text(chart(), encoding="utf-8")
