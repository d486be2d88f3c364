"""The purposes of the temporary arrays of a compiled train step."""

from collections.abc import Callable, Collection, Sequence

from jmp_train.aot.array_types import ArrayType
from jmp_train.aot.data_flow import Array, DataFlow
from jmp_train.aot.hlo import Instruction
from jmp_train.aot.origins import Origins

ACTIVATIONS = "activations saved for the backward pass"
PARAMETER_COPIES = "copies of parameters"
GRADIENTS = "gradients"
WORKSPACES = "workspaces"
TEMPORARIES = "temporaries"

Maker = tuple[Instruction, int]
"""An instruction, and an array's place in its result."""


class Uses:
    """Finds the purpose of arrays.

    Args:
      flow: the data flow of the program.
      origins: the origins of the same program.
      parameters: the numbers of the arguments that are the model's parameters.
    """

    def __init__(self, flow: DataFlow, origins: Origins, parameters: Collection[int]) -> None:
        self._flow, self._origins = flow, origins
        self._parameters = {str(number) for number in parameters}
        self._gradients: dict[Array, bool] = {}
        self._copies: dict[Array, bool] = {}

    def kind(self, array: Array) -> str:
        """Returns the purpose of an array, one of the constants of this module.

        Args:
          array: a temporary array.
        """
        readers = {direction for reader in self._flow.readers.get(array, ()) for direction in self._directions(reader)}
        if self._is_workspace(array):
            return WORKSPACES
        if readers - {""} and self._is_copy(array):
            return PARAMETER_COPIES
        if "backward" in readers and not self._is_made_backward(array):
            return ACTIVATIONS
        return GRADIENTS if self._is_gradient(array) else TEMPORARIES

    def makers(self, array: Array) -> Sequence[Maker]:
        """Returns the instructions that write an array, without those that only fill it, for example with zeros.

        Args:
          array: any array.
        """
        makers = self._flow.makers.get(array, ())
        return [maker for maker in makers if self._sources(maker[0], array)] or makers

    def _sources(self, maker: Instruction, array: Array) -> list[Array]:
        """Returns the arrays that a maker of an array reads, without the array itself and without single numbers."""
        return [other for other in self._flow.operands(maker) if other != array and self._size(other) > 1]

    def _size(self, array: Array) -> int:
        type_ = self._type(array)
        return type_.size if type_ else 0

    def _type(self, array: Array) -> ArrayType | None:
        for maker, place in self._flow.makers.get(array, ()):
            if place < len(maker.arrays):
                return maker.arrays[place]
        return None

    def _directions(self, instruction: Instruction) -> set[str]:
        places = range(len(self._flow.arrays[instruction.name]))
        return {self._origins.of(instruction, place).direction for place in places}

    def _is_workspace(self, array: Array) -> bool:
        type_ = self._type(array)
        is_bytes = type_ is not None and type_.dtype in ("s8", "u8") and len(type_.shape) == 1
        return is_bytes and all(m.opcode == "custom-call" and place for m, place in self._flow.makers[array])

    def _is_made_backward(self, array: Array) -> bool:
        return any(self._origins.of(*maker).direction == "backward" for maker in self.makers(array))

    def _is_copy(self, array: Array) -> bool:
        """Returns whether an array is computed only from parameters, without a product."""
        return self._follow(array, self._copies, self._is_parameter, _copies)

    def _is_parameter(self, array: Array) -> bool:
        makers = self._flow.makers.get(array, ())
        return any(m.opcode == "parameter" and m.literal in self._parameters for m, _ in makers)

    def _is_gradient(self, array: Array) -> bool:
        """Returns whether an array is a result of the backward pass, or computed only from such results."""
        return self._follow(array, self._gradients, self._is_left_by_backward, lambda _: True)

    def _is_left_by_backward(self, array: Array) -> bool:
        readers = self._flow.readers.get(array, ())
        return self._is_made_backward(array) and any("" in self._directions(reader) for reader in readers)

    def _follow(
        self,
        array: Array,
        known: dict[Array, bool],
        is_start: Callable[[Array], bool],
        passes: Callable[[Instruction], bool],
        depth: int = 20,
    ) -> bool:
        """Returns whether an array is a start, or all of its makers pass and read only such arrays."""
        if array in known or depth == 0:
            return known.get(array, False)
        known[array] = False  # for cycles
        makers = [maker for maker, _ in self.makers(array)]
        sources = [source for maker in makers for source in self._sources(maker, array)]
        known[array] = is_start(array) or (
            bool(sources)
            and all(map(passes, makers))
            and all(self._follow(source, known, is_start, passes, depth - 1) for source in sources)
        )
        return known[array]


def _copies(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") in _COPIES


_COPIES = frozenset(
    ("fusion", "convert", "copy", "transpose", "slice", "dynamic-slice", "pad", "concatenate", "all-gather")
)
