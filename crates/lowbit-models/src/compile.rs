//! Compiles kernels before they are launched. The model is loaded and run once on a device that
//! only lists them ([`DryRun`](lowbit_kernels::gpu::DryRun)), so the list is the ops' own choice.

use crate::{
    BatchRow, BatchSteps, CachePool, FirstRow, GenerationOptions, Logits, Model, ModelError, PoolSequence,
    Script, Session, Speculation, Target,
};
use lowbit_files::{Checkpoint, Pooling};
use lowbit_kernels::KernelError;
use lowbit_kernels::ops::{PAGE_TOKENS, SampleParams};
use std::ops::ControlFlow::Continue;

impl Model {
    /// Loads as [`Self::load_for`] does, and meanwhile compiles the kernels that `work` will launch
    /// on the loaded model and that are not in the device's cache on the disk: several at a time,
    /// where launching them would compile one after the other. `work` is called with a model that
    /// computes nothing and takes no memory; all data read from its device is zeros.
    /// [`dry_generation`], [`dry_batches`] and [`dry_perplexity`](crate::dry_perplexity) are such
    /// work. `progress` is called with the number of compiled kernels and of all kernels to
    /// compile, if there are any. On a CPU this is [`Self::load_for`].
    ///
    /// # Errors
    /// As [`Self::load_for`]; those of `work`;
    /// [`KernelError::Kernel`](lowbit_kernels::KernelError::Kernel) for a kernel that does not
    /// compile.
    pub fn load_compiled(
        checkpoint: &Checkpoint,
        target: Target,
        work: impl FnOnce(&Self) -> Result<(), ModelError> + Send,
        progress: impl FnMut(usize, usize) + Send,
    ) -> Result<Self, ModelError> {
        let Some(dry_run) = target.device.dry_run() else { return Self::load_for(checkpoint, target) };
        let dry_target = target.on(dry_run.device());
        std::thread::scope(|scope| {
            let compile = move || {
                work(&Self::load_for(checkpoint, dry_target)?)?;
                Ok(dry_run.compile(progress)?)
            };
            let compiled = std::thread::Builder::new().spawn_scoped(scope, compile);
            let compiled = compiled.map_err(KernelError::ThreadPool)?;
            let model = Self::load_for(checkpoint, target.clone());
            let compiled: Result<(), ModelError> =
                compiled.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // A fault of the checkpoint is an error of both.
            let model = model?;
            compiled.map(|()| model)
        })
    }
}

/// Work for [`Model::load_compiled`]: messages of several lengths and the start of each reply.
/// Messages of other lengths rarely need other kernels, which are then compiled when they are
/// launched.
///
/// # Errors
/// As [`Session::generate`].
pub fn dry_chat(model: &Model, options: &GenerationOptions) -> Result<(), ModelError> {
    dry_generation(model, &[12, 24, 48, 96, 192, 384], options)
}

/// For [`Model::load_compiled`]: prompts of several lengths in a [`CachePool`], alone and together,
/// and steps of each number of rows up to `rows` that is captured, as an engine runs them.
///
/// # Errors
/// As [`BatchSteps::step`].
pub fn dry_batches(model: &Model, rows: usize, options: &GenerationOptions) -> Result<(), ModelError> {
    if model.config().headless {
        return Ok(());
    }
    let limit = model.config().max_position_embeddings;
    // All tokens drawn are 0, which a grammar may forbid.
    let window = options.repetition_context.min(limit);
    let options = &GenerationOptions { grammar: None, ..options.clone() }.with_repetition_context(window);
    let greedy = options.clone().with_sampling(SampleParams::default());
    let mut steps = BatchSteps::new(model, rows, limit, window)?;
    let pages = LONGEST / PAGE_TOKENS + steps.capacity();
    let mut pool = CachePool::new(model, pages, steps.capacity(), 1)?;
    dry_prompts(model, &mut pool, &mut steps, [options, &greedy])?;
    let mut caches = vec![];
    while let Some(mut cache) = pool.cache()? {
        pool.make_room(&mut cache, 1);
        caches.push(cache);
    }
    for count in BatchSteps::buckets(steps.capacity()) {
        for options in [options, &greedy] {
            let row = |(id, cache)| BatchRow {
                id: id as u64,
                cache,
                text: &[0],
                sampled: 0,
                options,
                rules: None,
                draws: true,
                logprobs: None,
            };
            let mut rows: Vec<_> = caches.iter_mut().take(count).enumerate().map(row).collect();
            steps.step(model, &mut pool, &mut rows)?;
            caches.iter_mut().take(count).try_for_each(|cache| pool.go_back(cache, 0, None))?;
        }
    }
    Ok(())
}

/// For [`Model::load_compiled`]: steps of up to `rows` sequences with up to `most` guesses after
/// each token, in at most 64 rows, as an engine that guesses runs them besides.
///
/// # Errors
/// As [`BatchSteps::verify`].
pub fn dry_guesses(
    model: &Model,
    (rows, most): (usize, usize),
    options: &GenerationOptions,
) -> Result<(), ModelError> {
    if model.config().headless {
        return Ok(());
    }
    let limit = model.config().max_position_embeddings;
    let window = options.repetition_context.min(limit);
    let options = GenerationOptions { grammar: None, ..options.clone() }
        .with_repetition_context(window)
        .with_stop_ids(vec![]);
    let mut steps = BatchSteps::new(model, rows.min(32), limit, window)?;
    let mut pool = CachePool::new(model, steps.capacity(), steps.capacity(), 0)?;
    let mut caches = vec![];
    while let Some(mut cache) = pool.cache()? {
        pool.make_room(&mut cache, 1 + most);
        caches.push(cache);
    }
    for count in BatchSteps::buckets(steps.capacity()) {
        for guesses in (1..=most).filter(|&guesses| count * (1 + guesses) <= 64 && guesses < limit) {
            let row = |(id, cache)| BatchRow {
                id: id as u64,
                cache,
                text: &[0],
                sampled: 0,
                options: &options,
                rules: None,
                draws: true,
                logprobs: None,
            };
            let mut rows: Vec<_> = caches.iter_mut().take(count).enumerate().map(row).collect();
            let drafts = vec![vec![0; guesses]; count];
            steps.verify(model, &mut pool, (&mut rows, &drafts), false)?;
            caches.iter_mut().take(count).try_for_each(|cache| pool.go_back(cache, 0, None))?;
        }
    }
    Ok(())
}

/// The most tokens of [`dry_batches`]' prompts.
const LONGEST: usize = 4096;

/// Passes over prompts in `pool`, and the first token of each.
fn dry_prompts(
    model: &Model,
    pool: &mut CachePool,
    steps: &mut BatchSteps,
    options: [&GenerationOptions; 2],
) -> Result<(), ModelError> {
    /// Tokens of each; prompts as short as these are also run together.
    const SHORT: [usize; 11] = [3, 5, 14, 16, 24, 28, 48, 64, 128, 192, 384];
    const LONG: [usize; 4] = [768, 1152, 2048, LONGEST];
    /// Ends of prompts behind a cached start: attention has kernels of its own for few rows.
    const ENDS: [usize; 14] = [1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 28, 40, 56];
    let limit = model.config().max_position_embeddings;
    for tokens in SHORT.into_iter().chain(LONG).map(|tokens| tokens.min(limit)) {
        let Some(mut cache) = pool.cache()? else { continue };
        pool.make_room(&mut cache, tokens);
        let mark = pool.mark_at(tokens)?;
        let batch = &mut [PoolSequence {
            tokens: &vec![0; tokens],
            cache: &mut cache,
            marks: std::slice::from_ref(&mark),
        }];
        if let Some(logits) = model.forward_batch_in(pool, batch, Logits::Last)? {
            for options in options {
                let row = FirstRow { row: 0, text: &[0], options, rules: None, logprobs: None };
                steps.first(logits.clone(), &mut [row])?;
            }
        }
        pool.go_back(&mut cache, tokens - tokens % PAGE_TOKENS, Some(&mark))?;
    }
    if let Some(mut cache) = pool.cache()? {
        let starts = [SHORT[SHORT.len() - 1].min(limit)];
        for tokens in starts.into_iter().chain(ENDS) {
            let end = cache.position() + tokens;
            if end <= limit && pool.make_room(&mut cache, end) {
                model.forward_in(pool, &mut cache, &vec![0; tokens], Logits::None)?;
            }
        }
    }
    // The states are kept on the way, as in prompts that end beside a block: what comes after the
    // mark is a turn of its own.
    for after in [1, PAGE_TOKENS / 2, PAGE_TOKENS] {
        let (Some(mut cache), marked) = (pool.cache()?, 2 * PAGE_TOKENS) else { continue };
        if marked + after > limit || !pool.make_room(&mut cache, marked + after) {
            continue;
        }
        let mark = pool.mark_at(marked)?;
        let (tokens, marks) = (&vec![0; marked + after], std::slice::from_ref(&mark));
        let batch = &mut [PoolSequence { tokens, cache: &mut cache, marks }];
        model.forward_batch_in(pool, batch, Logits::Last)?;
    }
    let mut texts = vec![];
    for tokens in SHORT.map(|tokens| tokens.min(limit)) {
        let Some(mut cache) = pool.cache()? else { break };
        pool.make_room(&mut cache, tokens);
        texts.push((vec![0; tokens], cache));
    }
    let batch = texts.iter_mut().map(|(tokens, cache)| PoolSequence { tokens, cache, marks: &[] });
    model.forward_batch_in(pool, &mut batch.collect::<Vec<_>>(), Logits::Last)?;
    Ok(())
}

/// For [`Model::load_compiled`]: texts of several lengths, alone and together, as [`Model::pooled`]
/// runs them.
///
/// # Errors
/// As [`Model::pooled`].
pub fn dry_pooled(model: &Model, pooling: Pooling) -> Result<(), ModelError> {
    let limit = model.config().max_position_embeddings;
    let lengths = [8, 16, 64, 256].map(|length: usize| length.min(limit));
    let texts = lengths.map(|length| vec![0; length]);
    let pooled = |texts: &[&[u32]]| model.dry_states(texts, pooling);
    texts.iter().try_for_each(|text| pooled(&[text]))?;
    pooled(&texts.each_ref().map(Vec::as_slice))
}

/// Work for [`Model::load_compiled`]: prompts of these lengths one after the other in one session,
/// each with the start of a reply. Prompts that do not fit the model's context are left out.
///
/// # Errors
/// As [`Session::generate`].
pub fn dry_generation(
    model: &Model,
    prompts: &[usize],
    options: &GenerationOptions,
) -> Result<(), ModelError> {
    /// Tokens of a reply: the first is sampled after the prompt, the second in the step that is
    /// captured, the third in its replay.
    const REPLY: usize = 3;
    dry_replies(Session::new(model), prompts, options, REPLY)
}

/// As [`dry_generation`] for a session that verifies up to `most` guesses per pass:
/// [`Speculation::with_most`].
///
/// # Errors
/// As [`Session::generate`].
pub fn dry_speculation(
    model: &Model,
    prompts: &[usize],
    options: &GenerationOptions,
    most: usize,
) -> Result<(), ModelError> {
    // All tokens drawn are 0, and so are the guesses.
    let limit = model.config().max_position_embeddings;
    let script = Script::new(vec![0; limit.min(LONGEST)], 1.0);
    let speculation = Speculation::new(script).with_most(most).with_fixed_pace();
    // A pass that runs, one that is captured, and its replay.
    let reply = 1 + 3 * (1 + speculation.most(model.device()));
    let mut session = Session::new(model);
    session.speculate(Some(speculation));
    dry_replies(session, prompts, options, reply)
}

/// Replies of `reply` tokens.
fn dry_replies(
    mut session: Session<'_>,
    prompts: &[usize],
    options: &GenerationOptions,
    reply: usize,
) -> Result<(), ModelError> {
    let config = session.model().config();
    if config.headless {
        return Ok(());
    }
    let limit = config.max_position_embeddings;
    // All tokens drawn are 0, which may be a stop id, and which a grammar may forbid.
    let mut options = options.clone().with_max_tokens(options.max_tokens.min(reply)).with_stop_ids(vec![]);
    options.grammar = None;
    for &tokens in prompts {
        if tokens == 0 || session.tokens().len().saturating_add(tokens).saturating_add(reply) > limit {
            continue;
        }
        if let Some(logits) = session.prefill(&vec![0; tokens], |_| Continue(()))? {
            session.generate(logits, &options, |_| Continue(()))?;
        }
    }
    // Windows move on, and are marked, by the same copies.
    let mut cache = session.cache().clone();
    let mark = cache.mark()?;
    Ok(cache.go_back(&mark)?)
}
