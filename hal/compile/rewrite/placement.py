"""Where a rewrite's replacement may stand, so that everybody reads what they read before."""

from __future__ import annotations

from torch import fx

from hal.compile.fx.alias_analysis import Memory, overlap, written
from hal.compile.rewrite.match import Match, NearMiss


def place_of(match: Match, node: fx.Node, memory: Memory) -> fx.Node:
    """Before which node the replacement goes: the first that reads what the pattern gives, or what follows it all.

    Raises:
        NearMiss: at ``node``, for there is no such place: of the matched nodes some would have to pass a write to what
            they read, or a reader of what they write; or the pattern's outputs are views, and their memory is written.
    """
    inside = set(match.nodes)
    ordered = sorted(inside)
    first, last = ordered[0], ordered[-1]
    place = last.next
    for output in match.outputs:
        for user in output.users:
            if user not in inside and user < place:
                place = user
    for argument in match.arguments:
        if isinstance(argument, fx.Node) and not argument < place:
            raise NearMiss(node, f"{place.name} reads a part of it before {argument.name}, which it reads, is there")
    if (reason := memory.between(first, last, inside)) is not None:
        raise NearMiss(node, reason)
    _keep_order(match, node, memory)
    _keep_apart(match, node, memory)
    for output in match.outputs:
        _keep_views(output, match, node, memory, first)
    return place


def _keep_order(match: Match, node: fx.Node, memory: Memory) -> None:
    """What the matched nodes write, they read before and behind as the pattern does."""
    for index, writer in enumerate(match.nodes):
        for target in written(writer):
            for other_index, other in enumerate(match.nodes):
                if other_index != index and (other_index < index) != (other < writer):
                    for read in other.all_input_nodes:
                        if _meet(read, target, memory):
                            raise NearMiss(node, f"{other.name} and {writer.name} come in another order")


def _keep_apart(match: Match, node: fx.Node, memory: Memory) -> None:
    """What the pattern writes is in none of its other arguments."""
    targets = [target for each in match.nodes for target in written(each)]
    given = [each for each in match.arguments if isinstance(each, fx.Node)]
    for index, one in enumerate(given):
        if any(_meet(one, target, memory) for target in targets):
            for other in given[:index] + given[index + 1 :]:
                if _meet(one, other, memory):
                    raise NearMiss(node, f"{one.name}, which it writes, shares memory with its argument {other.name}")


def _keep_views(output: fx.Node, match: Match, node: fx.Node, memory: Memory, first: fx.Node) -> None:
    """An output that is a view becomes memory of its own: nobody may see the difference."""
    inside = set(match.nodes)
    for place in memory.places(output):
        shared = [each.name for each in match.outputs if each is not output and place in memory.places(each)]
        if memory.made_by(place) in inside and not shared:
            continue
        for writer in memory.writers(output):
            if writer > first:
                raise NearMiss(node, f"{writer.name} writes to memory that {output.name} is a view of")
        returned = memory.returned.get(place, [])
        if returned and (memory.is_input(place) or len(set(returned)) > 1):
            raise NearMiss(node, f"{output.name} is a view, and the graph returns another of the same memory")


def _meet(one: fx.Node, other: fx.Node, memory: Memory) -> bool:
    if one is other:
        return True
    return not set(memory.places(one)).isdisjoint(memory.places(other)) and overlap(one, other)
