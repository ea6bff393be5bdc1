"""Several devices: groups of ranks, the collectives between them, the split of models, and the start of ranks."""

from hal.device.group import SOLO, Group, group, groups
from hal.parallel.mesh import Mesh, connect

__all__ = ["SOLO", "Group", "Mesh", "connect", "group", "groups"]
