//! `lowbit-dynamo --model FOLDER`: a worker of NVIDIA Dynamo.

use clap::Parser;
use dynamo_backend_common::{CommonArgs, WorkerConfig};
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

fn main() -> anyhow::Result<()> {
    let Arguments { common, settings } = Arguments::parse();
    if !matches!(common.disaggregation_mode, dynamo_backend_common::DisaggregationMode::Aggregated) {
        anyhow::bail!("--disaggregation-mode: this worker reads prompts and writes replies (agg)");
    }
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
