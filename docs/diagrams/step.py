"""The way of a step, from state and batch to the next state."""

from parts import arrow, box, diagram, frame, key, text

LEFT, WIDE = 20, 400
MIDDLE = LEFT + WIDE / 2
SCALE = 600  # where the scale's way goes down


def draw() -> str:
    """Returns the picture."""
    alt = (
        "Parameters and batch are cast by the policy, the loss is computed and multiplied by the loss scale; gradients "
        "stay scaled until the update, which divides by the scale, checks whether all are finite, and selects the "
        "new state or the old one."
    )
    return diagram(720, 850, alt, _parts())


def _parts() -> list[str]:
    def wide(y: float, *lines: str, kind: str = "float32") -> str:
        return box(LEFT, y, WIDE, lines, kind)

    down = [(82, 106), (158, 182), (234, 258), (310, 334), (386, 410)]
    return [
        key(20, 4, [("float32", "float32"), ("half", "compute dtype, such as float16"), ("", "either")]),
        box(20, 30, 220, ["state.params", "float32"], "float32"),
        box(260, 30, 160, ["batch", "as it comes"]),
        box(480, 30, 220, ["loss scale", "in state.opt_state"], "float32"),
        *(arrow((x, 82), (x, 106)) for x in (130, 340)),
        wide(106, "cast by the policy", "or operation by operation, by autocast", kind="half"),
        *(arrow((MIDDLE, y), (MIDDLE, end)) for y, end in down[1:]),
        wide(182, "loss_fn(params, model_state, batch, rng)", "runs in half where the policy says so", kind="half"),
        wide(258, "loss times scale", "the loss is float32 at least"),
        wide(334, "jax.grad", "gradients of the float32 params, still scaled"),
        wide(410, "mean", "over micro-batches, then over devices in reduce_dtype"),
        frame(8, 484, 704, 276),
        arrow((MIDDLE, 462), (MIDDLE, 520)),
        arrow((SCALE, 82), (SCALE, 284), (LEFT + WIDE, 284)),
        arrow((SCALE, 284), (SCALE, 546), (LEFT + WIDE, 546)),
        text(SCALE - 8, 436, "the same scale", "soft", "end"),
        text(445, 590, "with_loss_scale(...).update,", "soft"),
        text(445, 609, "then the step selects", "soft"),
        wide(520, "÷ scale", "in float32"),
        arrow((MIDDLE, 572), (MIDDLE, 596)),
        wide(596, "all finite?", "one answer for all devices"),
        arrow((130, 648), (130, 676)),
        arrow((MIDDLE + 100, 648), (MIDDLE + 100, 662), (530, 662), (530, 676)),
        text(138, 667, "yes"),
        text(440, 657, "no"),
        box(20, 676, 330, ["step", "the optimizer's update; the scale may grow", "after enough finite steps"], "good"),
        box(
            370, 676, 330, ["skip", "params, optimizer and model state stay", "to the last bit; the scale falls"], "bad"
        ),
        arrow((185, 747), (185, 790)),
        arrow((535, 747), (535, 790)),
        text(360, 780, "both are computed, one is selected", "soft", "middle"),
        box(20, 790, 680, ["next TrainState, and metrics"]),
    ]
