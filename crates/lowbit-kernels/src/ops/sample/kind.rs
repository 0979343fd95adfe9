use super::SampleParams;

/// The launches that a draw on a GPU needs. A batch needs the union of its rows' kinds; rows that
/// need less draw what they would draw alone.
///
/// The default is greedy: the greatest logit without penalties.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SampleKind {
    /// True if a temperature is above 0.
    pub(super) draws: bool,
    /// True if top-p is on.
    pub(super) top_p: bool,
    /// True if top-k is on.
    pub(super) top_k: bool,
    /// True if the history changes logits.
    pub(super) penalises: bool,
}

impl SampleKind {
    /// The kind that covers every other.
    pub const ALL: Self = Self { draws: true, top_p: true, top_k: true, penalises: true };

    /// The kind of a draw with these parameters.
    pub fn of(params: &SampleParams) -> Self {
        let draws = params.temperature > 0.0;
        Self {
            draws,
            top_p: draws && params.top_p < 1.0,
            top_k: draws && params.top_k > 0,
            penalises: params.penalises(),
        }
    }

    /// The kind that covers both.
    pub fn union(self, other: Self) -> Self {
        Self {
            draws: self.draws || other.draws,
            top_p: self.top_p || other.top_p,
            top_k: self.top_k || other.top_k,
            penalises: self.penalises || other.penalises,
        }
    }

    /// True if every launch that `other` needs is one of this kind's.
    pub fn covers(self, other: Self) -> bool {
        self.union(other) == self
    }

    /// The kind with both of top-p and top-k if it has one of them: 6 such kinds cover all 12, so
    /// that fewer passes are captured.
    pub fn coarse(self) -> Self {
        let searches = self.searches();
        Self { top_p: searches, top_k: searches, ..self }
    }

    /// True if a threshold is searched.
    pub(super) fn searches(self) -> bool {
        self.top_p || self.top_k
    }
}

impl std::fmt::Display for SampleKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.draws { "sampled" } else { "greedy" })?;
        for (is_on, name) in [(self.top_p, "top-p"), (self.top_k, "top-k"), (self.penalises, "penalties")] {
            if is_on {
                write!(f, " with {name}")?;
            }
        }
        Ok(())
    }
}
