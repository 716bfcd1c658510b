"""The OpenAI API without HTTP: parsing calls and building answers, for the server and for batch jobs."""

from __future__ import annotations

from .protocol_call import CHAT_COMPLETIONS, COMPLETIONS, Call, compile_call, parse_call, read_call
from .protocol_context import ApiContext
from .protocol_errors import error_reply
from .protocol_json import dump_json, parse_json
from .protocol_reply import Reply

__all__ = [
    "CHAT_COMPLETIONS",
    "COMPLETIONS",
    "ApiContext",
    "Call",
    "Reply",
    "compile_call",
    "dump_json",
    "error_reply",
    "parse_call",
    "parse_json",
    "read_call",
]
