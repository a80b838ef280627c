"""MOVED to reshard.verbs.convert. All verbs (inspect, verify, diff) belong in src/reshard/verbs/ too: a module
reshard.inspect or reshard.convert would shadow the function of that name in the public API. Put yours there."""

from reshard.verbs.convert import *  # noqa: F403
