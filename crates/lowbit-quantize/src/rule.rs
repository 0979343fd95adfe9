use crate::QuantizeError;
use lowbit_formats::{FloatType, Format};
use std::str::FromStr;

/// Another format for some tensors, as `PATTERN=FORMAT`.
///
/// A pattern matches a part of a tensor's name in the output (in MLX's layout: of the module's
/// path); `*` stands for any text. In MLX's layout a format is a number of bits (affine), `mxfp4`,
/// `mxfp8`, `nvfp4`, or `none` to leave the tensor unquantised; in GGUF it is a GGML type. The
/// first rule that matches holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pattern: String,
    format: String,
    /// True if the pattern is a whole name.
    whole: bool,
}

impl FromStr for Rule {
    type Err = QuantizeError;

    fn from_str(text: &str) -> Result<Self, QuantizeError> {
        match text.rsplit_once('=') {
            Some((pattern, format)) if !pattern.is_empty() && !format.is_empty() => {
                Ok(Self { pattern: pattern.into(), format: format.into(), whole: false })
            }
            _ => Err(QuantizeError::Rule { rule: text.into(), problem: "is not PATTERN=FORMAT".into() }),
        }
    }
}

impl Rule {
    /// The rule for the module of this name: affine with `bits` bits.
    pub(crate) fn exactly(name: &str, bits: usize) -> Self {
        Self { pattern: name.into(), format: bits.to_string(), whole: true }
    }

    /// The first of `rules` whose pattern is in `name`.
    pub(crate) fn find<'r>(rules: &'r [Self], name: &str) -> Option<&'r Self> {
        rules.iter().find(|rule| rule.matches(name))
    }

    /// Refuses rules that match none of `names`, the names of the quantised tensors.
    pub(crate) fn check<'n>(
        rules: &[Self],
        names: impl Iterator<Item = &'n str> + Clone,
    ) -> Result<(), QuantizeError> {
        match rules.iter().find(|rule| !names.clone().any(|name| rule.matches(name))) {
            None => Ok(()),
            Some(rule) => {
                let some = names.take(3).collect::<Vec<_>>().join(", ");
                Err(rule.refuse(format!("matches nothing that is quantised; some of that is {some}")))
            }
        }
    }

    fn matches(&self, name: &str) -> bool {
        if self.whole {
            return self.pattern == name;
        }
        let mut rest = Some(name);
        for part in self.pattern.split('*') {
            rest = rest.and_then(|rest| Some(&rest[rest.find(part)? + part.len()..]));
        }
        rest.is_some()
    }

    fn refuse(&self, problem: String) -> QuantizeError {
        QuantizeError::Rule { rule: format!("{}={}", self.pattern, self.format), problem }
    }

    /// The format in MLX's layout, affine in groups of `group_size` with scales in `scales`; `None`
    /// for none.
    pub(crate) fn mlx(&self, group_size: usize, scales: FloatType) -> Result<Option<Format>, QuantizeError> {
        if self.format == "none" {
            return Ok(None);
        }
        if let Ok(bits) = self.format.parse() {
            return Ok(Some(Format::affine(bits, group_size, scales)?));
        }
        let known = Format::from_mlx_mode(&self.format).ok().filter(|_| self.format != "affine");
        let want = "names no format of MLX's: a number of bits, mxfp4, mxfp8, nvfp4 or none";
        known.map(Some).ok_or_else(|| self.refuse(want.into()))
    }

    /// The GGML type.
    pub(crate) fn ggml(&self) -> Result<Format, QuantizeError> {
        let types = || Format::all().filter(|format| format.ggml_type().is_some() && format.encodes());
        let known = types().find(|format| format.to_string().eq_ignore_ascii_case(&self.format));
        known.ok_or_else(|| {
            let known =
                types().map(|format| format.to_string().to_uppercase()).collect::<Vec<_>>().join(", ");
            self.refuse(format!("names no type of GGML's that lowbit has: {known}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_parts_of_names() {
        for (pattern, name, want) in [
            ("ffn_down", "blk.0.ffn_down_exps.weight", true),
            ("blk.1.", "blk.11.ffn_down.weight", false),
            ("blk.1*down", "blk.11.ffn_down.weight", true),
            ("down*blk", "blk.11.ffn_down.weight", false),
            ("*", "anything", true),
        ] {
            let rule: Rule = format!("{pattern}=Q6_K").parse().unwrap();
            assert_eq!(rule.matches(name), want, "{pattern} in {name}");
        }
        assert_eq!(
            "ffn_down".parse::<Rule>().unwrap_err().to_string(),
            "rule ffn_down is not PATTERN=FORMAT"
        );
    }
}
