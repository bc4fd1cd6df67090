"""What another value of one of slime's flags can change: slime's own and Megatron-LM's arguments.

Names are those of ``slime/utils/arguments.py`` (v0.2.2 to main) and of Megatron-LM's
``training/arguments.py``, as the run's namespace has them (``--eps-clip`` is ``eps_clip``).
"""

from __future__ import annotations

import re

#: Begins the key of a setting that is one of slime's.
PREFIX = "slime."

#: The experiment: optimizer, loss, advantages, batches, sampling.
_ALGORITHM = re.compile(
    r"optimizer|adam_.*|sgd_momentum|muon_.*|lr|lr_.*|min_lr|decoupled_.*lr|head_lr_mult|"
    r"critic_lr.*|weight_decay.*|(start|end)_weight_decay|no_weight_decay_cond_type|"
    r"apply_wd_to_qk_layernorm|clip_grad|loss_type|eps_clip.*|value_clip|kl_.*|use_kl_loss|"
    r"use_unbiased_kl|entropy_coef|calculate_per_token_loss|advantage_estimator|gamma|lambd|"
    r"normalize_advantages|rewards_normalization|grpo_std_normalization|use_tis|tis_.*|use_opsm|"
    r"opsm_delta|use_opd|opd_kl_coef|opd_type|use_rollout_logprobs|use_rollout_entropy|"
    r"ref_update_interval|keep_old_actor|num_critic_only_steps|mask_offpolicy_in_partial_rollout|"
    r"global_batch_size|rollout_batch_size|num_steps_per_rollout|n_samples_per_prompt|"
    r"rollout_temperature|rollout_top_[pk]|moe_(aux|z)_loss_coeff|mtp_loss_scaling_factor|"
    r"loss_mask_type|only_train_params_name_list|freeze_params_name_list"
)
#: The model: another value is another function.
_MODEL = re.compile(
    r"num_layers|hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|kv_channels|"
    r"group_query_attention|vocab_size|untie_embeddings_and_output_weights|normalization|"
    r"layernorm_.*|qk_layernorm|qk_l2_norm|swiglu|squared_relu|openai_gelu|quick_geglu|"
    r"glu_linear_offset|activation_func_clamp_value|add_bias_linear|add_qkv_bias|"
    r"attention_output_gate|position_embedding_type|use_rotary_position_embeddings|"
    r"rotary_.*|rope_(scaling_factor|type)|use_rope_scaling|mrope_section|mscale.*|"
    r"no_rope_freq|softmax_type|window_(size|attn_skip_freq)|(attention|hidden)_dropout|"
    r"multi_latent_attention|[qk]v?_lora_rank|[qv]k?_head_dim|num_experts|moe_ffn_hidden_size|"
    r"moe_layer_freq|moe_shared_expert_(intermediate_size|gate)|moe_router_(topk.*|score_function|"
    r"group_topk|num_groups|pre_softmax|load_balancing_type|enable_expert_bias|force_.*|"
    r"bias_update_rate)|moe_apply_probs_on_input|moe_expert_capacity_factor|moe_input_jitter_eps"
)
#: Other kernels, formats, orders of adding, divisions of one batch.
_ROUNDING = re.compile(
    r".*_fusion|.*dtype.*|.*parallel_size|.*_in_(fp32|bf16)|.*bf16.*|.*fp16.*|.*fp32.*|.*fp8.*|"
    r"fp4.*|.*offload.*|recompute_.*|attention_backend|transformer_impl|sequence_parallel|"
    r"use_distributed_optimizer|use_flash_attn|use_precision_aware_optimizer|use_torch_fsdp2|"
    r"use_megatron_fsdp|cross_entropy_.*|deterministic_mode|batch_invariant_mode|"
    r"disable_jit_fuser|no_persist_layer_norm|apply_query_key_layer_scaling|"
    r"masked_softmax_fusion|micro_batch_size|use_dynamic_batch_size|max_tokens_per_gpu|"
    r"log_probs_(chunk_size|max_tokens_per_gpu)|balance_(data|by_flops)|variable_seq_lengths|"
    r"world_size|data_parallel_.*|distributed_backend|num_distributed_optimizer_instances|ddp_.*|"
    r"overlap_.*|tp_comm_.*|te_rng_tracker|cuda_graph.*|enable_cuda_graph|moe_grouped_gemm|"
    r"moe_token_dispatcher_type|moe_permute_fusion|moe_router_fusion|moe_enable_deepep|"
    r"moe_flex_.*|gradient_.*|num_layers_per_virtual_pipeline_stage|"
    r"num_virtual_stages_per_pipeline_rank|pipeline_model_parallel_layout|"
    r"microbatch_group_size_per_vp_stage|qwen_gdn_backend|allgather_cp|cp_comm_type"
)
#: Places, names, logging, what is saved, machines, and the engine that a replay does not use.
_HARMLESS = re.compile(
    r"(ref_|critic_)?load|(critic_)?save|save_.*|hf_checkpoint|prompt_data|.*_dir|"
    r"load_debug_rollout_data.*|dump_details|debug_.*|ckpt_.*|async_save|use_persistent_ckpt_worker|"
    r"non_persistent_.*|wandb_.*|use_wandb|tensorboard_.*|use_tensorboard|tb_.*|log_.*|"
    r"logging_level|timing_log_.*|.*one_logger.*|app_tag_.*|rank|local_rank|num_gpus_per_node|"
    r"(actor|critic)_num_(nodes|gpus_per_node)|rollout_num_gpus.*|colocate|sglang_.*|router_.*|"
    r"rollout_(external|health|buffer).*|use_fault_tolerance|update_weight_.*|http_proxy|profile.*|"
    r"use_pytorch_profiler|.*memory_snapshot.*|record_memory_history|memory_recorder|ci_.*|"
    r"train_env_vars|distributed_timeout.*|exit_.*|inference_.*|inprocess_.*|.*straggler.*|"
    r"eval_.*|skip_eval_before_train|n_samples_per_eval_prompt|num_workers|rl_.*"
)


def kind(flag: str) -> str:
    """``harmless``, ``algorithm``, ``rounding`` or ``unknown``, of a name without its prefix.

    A path of the user's own function is unknown: what lies at two paths may be one function or two.
    """
    found = (
        ("rounding", _ROUNDING),
        ("algorithm", _ALGORITHM),
        ("algorithm", _MODEL),
        ("harmless", _HARMLESS),
    )
    return next((name for name, pattern in found if pattern.fullmatch(flag)), "unknown")
