"""Build the training corpus: prompts, the target's own answers, checked token rows.

    python data.py --target smollm2 --limit 200
    python data.py --source starter --source file:chats.jsonl.gz --endpoint http://127.0.0.1:8000

Sources: starter[:train|calibration|bench], magpie, file:PATH, hub:NAME; each may end in
a slice, #START:STOP. Without --endpoint the target is served for as long as it is needed.
Interrupted runs go on where they stopped. Writes RUN_DIR/corpus, or --out.
"""

import shlex
from pathlib import Path

from forespark import cli


def main() -> None:
    flags = ("target", "source", "limit", "out", "endpoint", "dry-run")
    args, config = cli.stage("data", __doc__, *flags)
    out = args.out or Path(config.run_dir) / "corpus"
    if args.dry_run:
        from forespark.data.server import serve_command
        from forespark.data.sources import check_files, needed_files

        data = config.data
        cli.plan(
            [
                f"collect prompts from {', '.join(data.sources)} (limit: {data.limit or 'none'})",
                f"answers by {config.target.model}, at most {data.max_tokens} tokens each, "
                f"from {args.endpoint or shlex.join(serve_command(config))}",
                f"write the corpus to {out}",
            ],
            [config.target.model, *needed_files(config)],
            config,
        )
        check_files(config)
        return
    from forespark.data.pipeline import run

    manifest = run(config, out=out, endpoint=args.endpoint)
    counts = manifest["counts"]
    print(
        f"{counts['rows']} rows, {counts['answer_tokens']} answer tokens; "
        f"left out or cut: {manifest['reasons'] or 'none'}"
    )
    cli.done(out, f"python train.py --target {config.target.name}")


if __name__ == "__main__":
    cli.run(main)
