"""What is asked of meshes and of where arrays lie on them."""

from jax.sharding import AxisType, Mesh, NamedSharding


def automatic(mesh: Mesh) -> Mesh:
    """Returns the mesh with axes that jax shards over by itself; explicit ones want inputs to be placed."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def axis_size(mesh: Mesh, axis: str) -> int:
    """Returns how many devices are along a mesh axis; raises TypeError or ValueError if there is no such."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if axis not in mesh.shape:
        known = ", ".join(map(repr, mesh.axis_names))
        raise ValueError(f"axis={axis!r} is none of the mesh's: {known}")
    return mesh.shape[axis]


def dimension_over(axis: str, sharding: NamedSharding) -> int:
    """Returns which dimension of an array is cut over a mesh axis; -1 if none is.

    Args:
      axis: the mesh axis.
      sharding: the array's.
    """
    for dimension, entry in enumerate(sharding.spec):
        if entry == axis or (isinstance(entry, tuple) and axis in entry):
            return dimension
    return -1
