"""Starts and stops the real engine on this machine: SGLang servers, and the router in front of several.

Importing this loads neither torch nor sglang; both belong to the processes that it starts.
"""

from slime_plugin.bridge.server.flags import Flags, chosen_device
from slime_plugin.bridge.server.process import ServerError
from slime_plugin.bridge.server.services import Router, Server

__all__ = ["Flags", "Router", "Server", "ServerError", "chosen_device"]
