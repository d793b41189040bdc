"""The hooks by slime's flag and their own import path."""

from __future__ import annotations

_ROLLOUT = "slime_plugin.hooks.rollout"
_TRAINING = "slime_plugin.hooks.train"

ROLLOUT_HOOKS = {
    "custom-generate-function-path": f"{_ROLLOUT}.generate",
    "custom-rm-path": f"{_ROLLOUT}.reward",
    "custom-reward-post-process-path": f"{_ROLLOUT}.reward_post_process",
    "custom-convert-samples-to-train-data-path": f"{_ROLLOUT}.convert_samples",
    "custom-rollout-log-function-path": f"{_ROLLOUT}.rollout_log",
    "custom-eval-rollout-log-function-path": f"{_ROLLOUT}.evaluation_log",
}
TRAINING_HOOKS = {
    "custom-megatron-init-path": f"{_TRAINING}.init",
    "custom-model-provider-path": f"{_TRAINING}.model_provider",
    "rollout-data-postprocess-path": f"{_TRAINING}.rollout_data_postprocess",
    "custom-megatron-before-train-step-hook-path": f"{_TRAINING}.before_train_step",
    "custom-loss-function-path": f"{_TRAINING}.loss",
}
