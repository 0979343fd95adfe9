//! `lowbit-dynamo --model FOLDER`: a worker of NVIDIA Dynamo.

use clap::Parser;
use dynamo_backend_common::{CommonArgs, DisaggregationMode, WorkerConfig};
use lowbit_dynamo::{LowbitEngine, Settings};
use std::sync::Arc;

/// A worker of NVIDIA Dynamo that runs a low-bit model.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    common: CommonArgs,
    #[command(flatten)]
    settings: Settings,
}

/// That nothing is asked for which this worker does not do.
fn check(common: &CommonArgs) -> anyhow::Result<()> {
    let is_known = |kind: &str| ["chat", "completions"].contains(&kind.trim());
    for (flag, is_done) in [
        ("--disaggregation-mode", matches!(common.disaggregation_mode, DisaggregationMode::Aggregated)),
        ("--endpoint-types", common.endpoint_types.split(',').all(is_known)),
        ("--route-to-encoder", !common.route_to_encoder),
        ("--enable-rl", !common.enable_rl),
    ] {
        anyhow::ensure!(
            is_done,
            "{flag}: this worker reads prompts and writes replies of chat and completions, and no more"
        );
    }
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let Arguments { common, mut settings } = Arguments::parse();
    check(&common)?;
    settings.chat_template.clone_from(&common.custom_jinja_template);
    let config = WorkerConfig {
        namespace: common.namespace,
        component: common.component,
        endpoint: common.endpoint,
        endpoint_types: common.endpoint_types,
        model_name: settings.model.clone(),
        served_model_name: settings.served_model_name.clone(),
        custom_jinja_template: common.custom_jinja_template,
        tool_call_parser: common.dyn_tool_call_parser,
        reasoning_parser: common.dyn_reasoning_parser,
        exclude_tools_when_tool_choice_none: common.exclude_tools_when_tool_choice_none,
        runtime: common.runtime,
        ..WorkerConfig::default()
    };
    dynamo_backend_common::run(Arc::new(LowbitEngine::new(settings)), config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_that_are_not_played_are_refused_by_their_flag() {
        let check = |flags: &[&str]| {
            let line = ["lowbit-dynamo", "--model", "DIR"].iter().chain(flags);
            check(&Arguments::try_parse_from(line).expect("flags").common).map_err(|error| error.to_string())
        };
        assert_eq!(check(&["--endpoint-types", "chat, completions"]), Ok(()));
        for flags in [
            &["--disaggregation-mode", "prefill"][..],
            &["--endpoint-types", "chat,embeddings"],
            &["--route-to-encoder"],
            &["--enable-rl"],
        ] {
            let error = check(flags).unwrap_err();
            assert!(error.starts_with(&format!("{}: this worker reads prompts", flags[0])), "{error}");
        }
    }
}
