"""Every optimizer of optax and of `optax.contrib` by its name: the library promises that wrappers take them."""

import functools
from collections.abc import Callable
from typing import Any

import optax
from optax import contrib

ALIASES: dict[str, Callable[[], Any]] = {
    **{
        name: functools.partial(getattr(optax, name), 0.1)
        for name in (
            "adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad",
            "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd", "optimistic_adam_v2",
            "optimistic_gradient_descent", "radam", "rprop", "sign_sgd", "sm3", "yogi",
        )
    },
    "lbfgs": lambda: None,  # in OTHERS
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "optimistic_adam": lambda: None,  # deprecated
    "polyak_sgd": lambda: None,  # wants the loss
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "signum": lambda: optax.signum(0.1),
}  # fmt: skip
CONTRIB: dict[str, Callable[[], Any]] = {
    "acprop": lambda: contrib.acprop(0.1),
    "ademamix": lambda: contrib.ademamix(0.1),
    "adopt": lambda: contrib.adopt(0.1),
    "cocob": contrib.cocob,
    "dadapt_adamw": lambda: contrib.dadapt_adamw(0.1),
    "differentially_private_aggregate": lambda: None,  # takes a gradient for each example
    "dog": lambda: contrib.dog(0.1),
    "dowg": lambda: contrib.dowg(0.1),
    "dpsgd": lambda: None,  # takes a gradient for each example
    "galore": lambda: contrib.galore(0.1, rank=1),
    "madgrad": lambda: contrib.madgrad(0.1),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "momo": lambda: contrib.momo(0.1),
    "momo_adam": lambda: contrib.momo_adam(0.1),
    "muon": lambda: contrib.muon(0.1),
    "normalize": lambda: optax.chain(contrib.normalize(), optax.scale(-0.1)),
    "prodigy": lambda: contrib.prodigy(0.1),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=1)),
    "sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(0.1), 0.1),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(0.1),
    "schedule_free_sgd": lambda: contrib.schedule_free_sgd(0.1),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(0.1),
    "sophia": lambda: contrib.sophia(0.1, update_interval=1),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.sgd(0.1)),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
    ),
    "opaque sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True),
    "sam in a chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), contrib.sam(optax.sgd(0.1), optax.sgd(0.05))),
}
