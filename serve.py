"""Start one arm as an OpenAI-compatible server on patched vLLM.

    python serve.py --target smollm2 --arm forespark [--port 8000] [--trace [PATH]]

Flags it does not know go to ``vllm serve``; ``key=value`` settings are its own. Missing
checkpoints, heads, calibration or tables stop it with the command that makes them.
Prometheus metrics are at ``/metrics`` (``forespark:*`` beside vLLM's).
"""

from forespark import cli


def main() -> int:
    args, config = cli.stage(
        "serve", __doc__, "target", "arm", "port", "trace", "dry-run", passthrough=True
    )
    from forespark.serving.server import run_server

    return run_server(config, args.extra, dry_run=args.dry_run)


if __name__ == "__main__":
    cli.run(main)
