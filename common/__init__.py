"""Code that at least three folders share: settings, errors, RPC set-up, logging, metrics. Never imports torch."""

import os

VERSION = "0.1.0"  # in the package's metadata, `mini_infer.__version__`, GET /version and WorkerInfo

# grpc reads this when it is first imported, so it is set here, where all of our processes begin. Why:
# docs/decisions/messages-and-the-token-path.md.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
