"""Start and stop SGLang servers on this machine.

Importing this loads neither torch nor sglang; only the server's processes do.
"""

from slime_plugin.rollout.server.ports import ServerError
from slime_plugin.rollout.server.sglang_flags import Flags, chosen_device
from slime_plugin.rollout.server.sglang_server import Server

__all__ = ["Flags", "Server", "ServerError", "chosen_device"]
