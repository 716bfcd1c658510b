"""A server process over the scripted model, whose steps take 5 ms: `serve_scripted.py DRAIN_SECONDS`.

Prints its port once it serves; the exit status is that of `pelton serve`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pelton.runtime.server.gateway import GatewayConfig
from pelton.runtime.server.serving import ServerConfig, bind, run_server
from support.tiny_model import scripted_engine


def main() -> int:
    pace = threading.Event()
    engine = scripted_engine(
        max_model_len=4096, num_blocks=2048, before_step=lambda step, inputs: pace.wait(0.005) and None
    )
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    config = ServerConfig(("tiny",), gateway=GatewayConfig(drain_seconds=float(sys.argv[1])))
    return 0 if run_server(engine, sock, config, lambda: print(port, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
