"""One long document per update on one GPU: tokens per second at 32k, and the largest context that fits.

    python benchmarks/long_context.py [--context 32768] [--longest 1048576] [--arms ours transformers ...] [--json FILE]

The model, its data and its MFU are those of sft.py. After the arms, ours trains one update of a document twice as long,
in a fresh process, until one does not fit, fails, or takes longer than the timeout.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from arms import ARMS, Benchmark, Results, Target, Tolerance, add_options, main
from processes import Result, run_arm
from sft import MODELS, task


def work(options: argparse.Namespace, arm: str) -> Result:
    from trainers import run

    options.samples, options.prompt_masked, options.bf16_weights = 1, False, False
    return run(arm, task(options, context=options.context))


def largest_that_fits(options: argparse.Namespace, words: list[str], results: Results) -> Iterator[Result]:
    """Double the context of ours from the one measured until one update does not come through."""
    tried: list[Result] = []
    context = options.context
    fits = context if results.get("ours", {}).get("status") in ("ok", "void") else None
    while fits == context and context < options.longest:
        context *= 2
        once = ["--context", str(context), "--warmup", "0", "--seconds", "0", "--updates", "1"]
        print(f"  ours at {context:,} ...", end=" ", flush=True)
        result = run_arm(__file__, "ours", [*words, *once], options.timeout)
        kept = ("status", "note", "peak_gib", "first_update_s", "speed_report")
        tried.append({"context": context, **{name: result.get(name) for name in kept}})
        print(f"{result['status']} {result.get('note', '')} {result.get('peak_gib') or 0:.1f} GiB", flush=True)
        fits = context if result["status"] == "ok" else fits
        yield {"largest_context": fits, "contexts": tried}
    print(f"largest context of ours that fits: {fits:,}" if fits else "ours did not come through")
    yield {"largest_context": fits, "contexts": tried}


def about(options: argparse.Namespace) -> Result:
    return {"model": options.model, "weights": "fp32 + bf16 autocast", "tokens per update": options.context}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="One long document per update on one GPU.")
    parser.add_argument("--model", choices=MODELS, default="1.24b")
    parser.add_argument("--context", type=int, default=32_768, help="tokens of the one document of an update")
    parser.add_argument("--longest", type=int, default=1_048_576, help="where doubling the context ends")
    add_options(parser, warmup=2, warm_seconds=3.0, seconds=8.0, updates=4, timeout=150.0)
    parser.set_defaults(arms=list(ARMS))
    return parser


if __name__ == "__main__":
    told = parser().parse_args()
    benchmark = Benchmark(
        name=f"long-context-{told.model}-{told.context}",
        script=__file__,
        work=work,
        about=about,
        tolerance=lambda options: Tolerance(),
        targets=lambda options: [Target("31,000 tokens/s", "tokens_per_s", 31_000.0)] * (options.context == 32_768),
        afterwards=largest_that_fits,
    )
    main(benchmark, parser())
