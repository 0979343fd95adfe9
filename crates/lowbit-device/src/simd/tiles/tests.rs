use super::*;
use crate::random::Random;
use bytemuck::Zeroable;

/// `steps` steps of both operands' two tiles, of numbers that `value` makes.
fn operands(steps: usize, mut value: impl FnMut() -> bf16) -> [Vec<Pairs>; 4] {
    let mut tile = || {
        let mut tile = Pairs::zeroed();
        tile.0.as_flattened_mut().as_flattened_mut().fill_with(&mut value);
        tile
    };
    std::array::from_fn(|_| (0..steps).map(|_| tile()).collect())
}

fn normal(random: &mut Random) -> bf16 {
    bf16::from_f32(random.normal(1, 1.0)[0])
}

/// Values that most often go wrong: zeros, subnormals, the smallest and greatest numbers,
/// infinities, NaN.
#[cfg(target_arch = "x86_64")]
fn edge(random: &mut Random) -> bf16 {
    const EDGES: [u16; 16] = [
        0, 0x8000, 1, 0x807f, 0x007f, 0x0080, 0x8080, 0x0100, 0x3f80, 0xbf80, 0x7f7f, 0xff7f, 0x2000, 0x1fff,
        0x6000, 0xdfff,
    ];
    match random.below(400) {
        0 => bf16::INFINITY,
        1 => bf16::NAN,
        2..200 => bf16::from_bits(EDGES[random.below(16)]),
        _ => bf16::from_bits(random.bits() as u16 & 0xbfff),
    }
}

/// A product by every count of tiles.
struct Multiply<'a> {
    operands: &'a [Vec<Pairs>; 4],
    sums: Block,
    start: Start,
}

impl TileKernel for Multiply<'_> {
    type Output = [Block; 4];

    #[inline(always)]
    fn run<S: Simd, T: Tiles>(self, _: S, tiles: &mut T) -> Self::Output {
        let [a0, a1, b0, b1] = self.operands.each_ref().map(|operand| &operand[..]);
        let mut sums = [self.sums; 4];
        tiles.multiply([a0, a1], [b0, b1], &mut sums[0], self.start, Ahead::default());
        tiles.multiply([a0], [b0, b1], &mut sums[1], self.start, Ahead::default());
        tiles.multiply([a0, a1], [b0], &mut sums[2], self.start, Ahead::default());
        tiles.multiply([a0], [b0], &mut sums[3], self.start, Ahead::default());
        sums
    }
}

fn multiply<U: TileUnit>(unit: U, operands: &[Vec<Pairs>; 4], sums: Block, start: Start) -> [Block; 4] {
    unit.dispatch(Isa::detect(), Multiply { operands, sums, start })
}

#[test]
fn the_model_multiplies() {
    let mut random = Random::new(1);
    for (steps, start) in [(1, Start::Zero), (3, Start::Sums), (0, Start::Zero), (0, Start::Sums)] {
        let operands = operands(steps, || normal(&mut random));
        let before = [[Sums([[2.5; TILE]; TILE]); 2]; 2];
        let after = multiply(Model, &operands, before, start);
        for (case, (m, n)) in [(2, 2), (1, 2), (2, 1), (1, 1)].into_iter().enumerate() {
            for (i, j, row, column) in
                (0..4 * TILE * TILE).map(|at| (at / 512, at / 256 % 2, at / TILE % TILE, at % TILE))
            {
                let got = after[case][i][j].0[row][column];
                if i >= m || j >= n {
                    assert!(got == 2.5 || steps == 0 && got == 0.0, "tile {i} {j} is not asked for");
                    continue;
                }
                let mut want = if start == Start::Zero { 0.0 } else { 2.5 };
                let mut magnitude = want;
                for (a, b) in operands[i].iter().zip(&operands[2 + j]) {
                    for (a, b) in a.0[row].iter().zip(&b.0) {
                        for (a, b) in a.iter().zip(&b[column]) {
                            want += a.to_f64() * b.to_f64();
                            magnitude += (a.to_f64() * b.to_f64()).abs();
                        }
                    }
                }
                let bound = crate::gamma::gamma(STEP * steps + 2) * magnitude;
                assert!((f64::from(got) - want).abs() <= bound, "{got}, {want}");
            }
        }
    }
}

#[test]
fn the_model_takes_subnormals_for_zero() {
    let product = |a: f32, b: f32, sum: f32| {
        let [mut x, mut w] = [Pairs::zeroed(); 2];
        (x.0[3][5][1], w.0[5][7][1]) = (bf16::from_f32(a), bf16::from_f32(b));
        let mut sums = [[Sums::zeroed(); 2]; 2];
        sums[0][0].0[3][7] = sum;
        multiply(Model, &[vec![x], vec![x], vec![w], vec![w]], sums, Start::Sums)[3][0][0].0[3][7]
    };
    let least = f32::MIN_POSITIVE;
    assert_eq!(product(3.0, 5.0, 7.0), 22.0);
    // An operand, a product and a sum.
    assert_eq!(product(least / 2.0, 4.0, 0.0), 0.0);
    assert_eq!(product(least, 0.5, 0.0), 0.0);
    assert_eq!(product(0.0, 0.0, least / 2.0), 0.0);
    assert_eq!(product(least, 4.0, 0.0), 4.0 * least);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn amx_is_its_model() {
    let Some(amx) = Amx::detect() else { return };
    let mut random = Random::new(2);
    for turn in 0..200 {
        let operands = match turn % 2 {
            0 => operands(turn % 5, || normal(&mut random)),
            _ => operands(turn % 5, || edge(&mut random)),
        };
        let mut sums = [[Sums::zeroed(); 2]; 2];
        for sum in sums.as_flattened_mut().iter_mut().flat_map(|sums| sums.0.as_flattened_mut()) {
            *sum = match random.below(8) {
                0 => f32::from_bits(random.bits() as u32),
                1 => f32::from_bits(random.below(1 << 24) as u32),
                _ => random.uniform(),
            };
        }
        for start in [Start::Zero, Start::Sums] {
            let [got, want] =
                [multiply(amx, &operands, sums, start), multiply(Model, &operands, sums, start)];
            // Tiles that are not asked for need not be the same.
            for (case, (m, n)) in [(2, 2), (1, 2), (2, 1), (1, 1)].into_iter().enumerate() {
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let [got, want] = [&got, &want].map(|sums| sums[case][i][j].0.as_flattened());
                    for (at, (got, want)) in got.iter().zip(want).enumerate() {
                        let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                        assert!(same, "turn {turn}, {m} by {n}, tile {i} {j} [{at}]: {got:e}, {want:e}");
                    }
                }
            }
        }
    }
}
