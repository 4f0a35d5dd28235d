"""Check that no keys of a configuration contradict each other; errors name the remedy."""

from __future__ import annotations

from math import inf

from dpfed.config.sections import Config, DataSection, PrivacySection
from dpfed.errors import DpfedError

CLIP_MODE_OF = {
    "clip_stability": "automatic",
    "quantile": "quantile",
    "quantile_lr": "quantile",
    "quantile_noise": "quantile",
}


def check(config: Config) -> None:
    """Raise DpfedError for the first pair of settings that contradict each other."""
    refuse_idle_augmentations(config.data)
    _check_privacy(config.privacy)
    _check_clipping(config.privacy)


def refuse_idle_augmentations(data: DataSection) -> None:
    """Raise DpfedError if a run averages gradients over augmentations that are all equal.

    This is so if `data.views`, the number of augmentations of an image, is above 1 while
    `data.augment` is "none".
    """
    if data.views > 1 and data.augment == "none":
        raise DpfedError(
            f"data.views = {data.views} needs views that differ: "
            'give data.augment, such as "crop_flip"'
        )


def _check_privacy(p: PrivacySection) -> None:
    no_noise = not p.enabled or p.sigma == 0
    fractional = isinstance(p.batch, int | float) and p.batch % 1 != 0
    refusals = (
        (
            (p.batch is None) == (p.rate is None),
            "give exactly one of privacy.batch (expected size) and privacy.rate",
        ),
        (
            p.enabled and (p.sigma is None) == (p.target_epsilon is None),
            "give exactly one of privacy.sigma and privacy.target_epsilon "
            "(or privacy.enabled = false)",
        ),
        (
            p.enabled and p.clip == inf and p.sigma != 0,
            "privacy.clip = inf is allowed only with privacy.sigma = 0, which gives no privacy",
        ),
        (
            p.budget is not None and p.target_epsilon is not None and p.view == "third_party",
            "privacy.budget makes the clients that are left be drawn more often, so a target for "
            'view = "third_party" could not be kept: use another privacy.view or no budget',
        ),
        (
            p.sigma_per_client and p.target_epsilon is None,
            "privacy.sigma_per_client calibrates each client to privacy.target_epsilon: "
            "give that, not sigma",
        ),
        (
            p.budget is not None and no_noise,
            "privacy.budget cannot be kept without noise: "
            "give privacy.sigma > 0 or a target_epsilon",
        ),
        (
            p.sampling != "poisson" and fractional,
            f'privacy.batch = {p.batch} must be a whole number with sampling = "{p.sampling}"',
        ),
        (
            p.grid is True and no_noise,
            "privacy.grid = true is for sums with noise: "
            "it needs privacy.sigma > 0 or a target_epsilon",
        ),
    )
    for refused, sentence in refusals:
        if refused:
            raise DpfedError(sentence)


def _check_clipping(p: PrivacySection) -> None:
    for key, mode in CLIP_MODE_OF.items():
        value = getattr(p, key)
        if value is not None and p.clip_mode != mode:
            raise DpfedError(f'privacy.{key} has no effect without privacy.clip_mode = "{mode}"')
        if value == inf:
            raise DpfedError(f"privacy.{key} = inf is not allowed: it must be a finite number")
    if p.clip == inf and p.clip_mode != "flat":
        raise DpfedError(
            f'privacy.clip = inf has no meaning with privacy.clip_mode = "{p.clip_mode}"'
        )
