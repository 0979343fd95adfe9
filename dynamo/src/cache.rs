//! Dynamo's receivers of what is cached, and of how full the cache is.

use crate::Running;
use dynamo_backend_common::{ComponentSnapshot, KvEventPublisher, SnapshotPublisher};
use dynamo_llm::kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, compute_block_hash_for_seq,
};
use lowbit_engine::{Backend, CacheEvent, CacheEvents, Stats};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Time between two looks at the engine's figures.
const LOOK: Duration = Duration::from_millis(200);

/// The receivers, once Dynamo has made them.
#[derive(Default)]
pub(crate) struct Publishers {
    kv: OnceLock<Arc<KvEventPublisher>>,
    figures: OnceLock<Arc<SnapshotPublisher>>,
    events: AtomicU64,
}

impl std::fmt::Debug for Publishers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publishers").finish_non_exhaustive()
    }
}

impl Publishers {
    /// Each is made once; nothing has run before.
    pub(crate) fn set_kv(&self, publisher: Arc<KvEventPublisher>) {
        let _ = self.kv.set(publisher);
    }

    pub(crate) fn set_figures(&self, publisher: Arc<SnapshotPublisher>) {
        let _ = self.figures.set(publisher);
    }

    /// The receiver of the engine's changes.
    pub(crate) fn events(self: &Arc<Self>) -> CacheEvents {
        let publishers = self.clone();
        CacheEvents::new(move |events| {
            let Some(publisher) = publishers.kv.get() else { return };
            let event = |event| {
                let event_id = publishers.events.fetch_add(1, Ordering::Relaxed);
                KvCacheEvent { event_id, data: data(event), dp_rank: 0 }
            };
            // Its other end goes when the worker does.
            let _ = publisher.publish_batch(events.into_iter().map(event).collect());
        })
    }

    /// Publishes the engine's figures while it runs.
    pub(crate) fn watch(self: &Arc<Self>, running: &Arc<Running>) {
        let (publishers, running) = (self.clone(), Arc::downgrade(running));
        tokio::spawn(async move {
            let mut last = None;
            while let Some(running) = running.upgrade() {
                let now = snapshot(&running.engine.stats());
                drop(running);
                if let Some(publisher) = publishers.figures.get().filter(|_| last != Some(now)) {
                    publisher.publish(0, now);
                    last = Some(now);
                }
                tokio::time::sleep(LOOK).await;
            }
        });
    }
}

fn snapshot(stats: &Stats) -> ComponentSnapshot {
    let block = (stats.block_tokens * stats.token_bytes).max(1);
    let hits = (stats.prompt_tokens > 0).then(|| stats.cached_tokens as f32 / stats.prompt_tokens as f32);
    ComponentSnapshot {
        kv_used_blocks: (stats.running_bytes / block) as u64,
        kv_total_blocks: (stats.budget_bytes / block) as u64,
        gpu_cache_usage: stats.running_bytes as f32 / stats.budget_bytes.max(1) as f32,
        kv_cache_hit_rate: hits,
        dp_rank: 0,
    }
}

/// A change in Dynamo's terms, whose routers name a block's own tokens by a hash of theirs.
fn data(event: CacheEvent) -> KvCacheEventData {
    match event {
        CacheEvent::Stored { parent, blocks, tokens } => {
            let size = tokens.len() / blocks.len().max(1);
            let options = BlockHashOptions::default();
            let of_tokens = compute_block_hash_for_seq(&tokens, size as u32, options);
            let block = |(&block, tokens_hash)| KvCacheStoredBlockData {
                block_hash: ExternalSequenceBlockHash(block),
                tokens_hash,
                mm_extra_info: None,
            };
            KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash: parent.map(ExternalSequenceBlockHash),
                start_position: None,
                blocks: blocks.iter().zip(of_tokens).map(block).collect(),
            })
        }
        CacheEvent::Removed { blocks } => {
            let block_hashes = blocks.into_iter().map(ExternalSequenceBlockHash).collect();
            KvCacheEventData::Removed(KvCacheRemoveData { block_hashes })
        }
        // Others may come: then nothing is promised.
        _ => KvCacheEventData::Cleared,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_named_as_routers_name_them() {
        let tokens: Vec<u32> = (0..128).collect();
        let stored = CacheEvent::Stored { parent: Some(5), blocks: vec![6, 7], tokens: tokens.clone() };
        let KvCacheEventData::Stored(stored) = data(stored) else { panic!("it is stored") };
        assert_eq!(stored.parent_hash, Some(ExternalSequenceBlockHash(5)));
        let of = |tokens: &[u32]| compute_block_hash_for_seq(tokens, 64, BlockHashOptions::default());
        let expected: Vec<_> = [6, 7].into_iter().zip(of(&tokens)).collect();
        let got: Vec<_> = stored.blocks.iter().map(|of| (of.block_hash.0, of.tokens_hash)).collect();
        assert_eq!(got, expected);
        // A block's own tokens name it.
        assert_eq!(got[1].1, of(&tokens[64..])[0]);
        let removed = data(CacheEvent::Removed { blocks: vec![7] });
        let block_hashes = vec![ExternalSequenceBlockHash(7)];
        assert_eq!(removed, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }));
        assert_eq!(data(CacheEvent::Cleared), KvCacheEventData::Cleared);
    }
}
