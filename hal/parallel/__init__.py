"""Several devices: groups of ranks, the collectives between them, the split of models, and the start of ranks."""

from hal.device.group import SOLO, Group, group, groups
from hal.parallel.mesh import Mesh, connect
from hal.parallel.weight_transfer import receive_weights, send_weights

__all__ = ["SOLO", "Group", "Mesh", "connect", "group", "groups", "receive_weights", "send_weights"]
