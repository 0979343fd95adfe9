//! The parts of models that lowbit and transformers compute, and mlx-lm 0.32 does not.

use crate::QuantizeError;
use crate::computed::Computed;
use lowbit_kernels::ops::{RopeScaling, RouterScores};
use lowbit_models::arch::MlxLm;
use lowbit_models::layers::{AttentionConfig, MoeConfig};

/// The differences that readers of a new checkpoint should know of, a sentence each.
///
/// # Errors
/// As [`Computed::rope`].
pub fn differences(computed: &Computed<'_>) -> Result<Vec<String>, QuantizeError> {
    let mut found = vec![];
    let MlxLm { always_ties, ignores_windows, wants_caps, .. } = computed.architecture.conversion.mlx_lm;
    let windows = computed.architecture.conversion.windows;
    if computed.outline.has_windows() && (ignores_windows || windows.is_none()) {
        let what = "attends to all tokens before, although sliding_window says that layers do not";
        found.push(format!("mlx-lm {what}: it computes longer texts otherwise"));
    }
    if computed.architecture.conversion.sees_later {
        found.push("mlx-lm's tokens do not see those after them: it computes otherwise".into());
    }
    if let Some(moe) = computed.experts() {
        routers(computed, moe, &mut found);
    }
    if computed.mamba().is_some_and(|mamba| mamba.n_groups > 1) {
        let what = "mlx-lm's gated norm of Mamba-2 is of all groups together";
        found.push(format!("{what}: it computes otherwise"));
    }
    rotary(computed, &mut found)?;
    if always_ties && !computed.decoder().tie_word_embeddings {
        let what = "mlx-lm's output layer of this architecture is the embedding, which it is not here";
        found.push(format!("{what}: it does not read the checkpoint"));
    }
    for (key, _) in computed.softcaps().filter(|(_, cap)| wants_caps && cap.is_none()) {
        found.push(format!("mlx-lm wants {key}, which is null: it does not compute the checkpoint"));
    }
    unread(computed, &mut found);
    let path = computed.config.path().display();
    Ok(found.into_iter().map(|found| format!("{path}: {found}")).collect())
}

fn routers(computed: &Computed<'_>, MoeConfig { router, .. }: &MoeConfig, found: &mut Vec<String>) {
    let of_ling = computed.computes("layer_group_size");
    if router.scores != RouterScores::Sigmoid || !computed.computes("n_shared_experts") || of_ling {
        return;
    }
    if router.top_k == 1 && router.normalize {
        let what = "mlx-lm does not divide the weight of a single expert by itself";
        found.push(format!("{what}, although norm_topk_prob is true: it computes otherwise"));
    }
    if router.n_group > 1 {
        let what = "mlx-lm takes experts of other groups before those whose score plus bias is negative";
        found.push(format!("{what}: it may compute otherwise"));
    }
}

fn rotary(computed: &Computed<'_>, found: &mut Vec<String>) -> Result<(), QuantizeError> {
    let scaling = computed.rope()?.scaling;
    let wants_yarn = computed.architecture.conversion.latents.is_some_and(|latents| latents.mlx_wants_yarn);
    let kind = match &scaling {
        RopeScaling::None if wants_yarn => {
            found.push("mlx-lm wants YaRN of this architecture: it does not read the checkpoint".into());
            return Ok(());
        }
        RopeScaling::None => return Ok(()),
        RopeScaling::Linear { .. } => "linear",
        RopeScaling::Llama3(_) => "llama3",
        RopeScaling::Yarn(_) => "yarn",
        RopeScaling::LongRope(_) => "longrope",
    };
    let known = computed.architecture.conversion.mlx_lm.rope_types;
    if known.is_some_and(|known| !known.contains(&kind)) {
        let what = format!("mlx-lm does not scale this architecture's rotary embedding as {kind}");
        found.push(format!("{what}: it computes otherwise"));
    } else if let RopeScaling::Yarn(yarn) = scaling
        && !yarn.truncate
    {
        found.push("mlx-lm takes YaRN's truncate, which is false, for true: it computes otherwise".into());
    }
    Ok(())
}

/// Checkpoints that mlx-lm fails on.
fn unread(computed: &Computed<'_>, found: &mut Vec<String>) {
    if computed.decoder().tie_word_embeddings && computed.architecture.conversion.mlx_lm.never_ties {
        let what = "mlx-lm wants an output layer of this architecture, which is the embedding here";
        found.push(format!("{what}: it does not read the checkpoint"));
    }
    let (window, sliding) = computed.windows();
    // EXAONE's layers do not rotate where others have a window, even if only in name.
    let still = !computed.attention().all(AttentionConfig::rotates);
    let has_windows = window.is_some() || still || computed.has_two_ropes();
    let both = sliding.contains(&true) && sliding.contains(&false);
    if computed.architecture.conversion.mlx_lm.wants_both_kinds && has_windows && !both {
        let what = "mlx-lm wants layers of both kinds, with a window and without";
        found.push(format!("{what}: it does not read the checkpoint"));
    }
    if computed.computes("kda_safe_gate") && computed.kimi_delta().is_some() && !computed.has_bounded_decay()
    {
        let what = "mlx-lm wants a decay with a bound, which kda_safe_gate says there is not";
        found.push(format!("{what}: it does not read the checkpoint"));
    }
    if computed.computes("linear_attn_config") {
        let attends: Vec<bool> = computed.latent_layers().collect();
        if !attends.contains(&true) || !attends.contains(&false) {
            let what = "mlx-lm wants layers of both kinds, latent attention and Kimi Delta Attention";
            found.push(format!("{what}: it does not read the checkpoint"));
        }
    }
    let attends = computed.attention().next().is_some();
    if computed.computes("conv_L_cache") && attends != computed.has_short_convolutions() {
        let what = "mlx-lm wants layers of both kinds, attention and convolutions";
        found.push(format!("{what}: it does not read the checkpoint"));
    }
}
