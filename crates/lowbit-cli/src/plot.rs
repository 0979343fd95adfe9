//! Charts as SVG: points on linear axes, joined by lines or not, one chart above the other.

use lowbit_files::shown;
use lowbit_files::staging::Content;
use std::fmt::Write;

/// A chart with its own axes. The y axis begins at 0 unless a value is below.
pub struct Chart {
    pub title: String,
    pub x_label: &'static str,
    pub y_label: &'static str,
    pub series: Vec<Series>,
}

/// Points of one colour, with a line in the legend.
pub struct Series {
    pub name: String,
    /// x and y; finite.
    pub points: Vec<(f64, f64)>,
    /// True if a line joins the points.
    pub joined: bool,
}

/// Colours that people with any colour vision tell apart (Okabe and Ito, "Color Universal Design",
/// 2008).
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];
const WIDTH: f64 = 800.0;
const PLOT_HEIGHT: f64 = 260.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
/// Below the plot: numbers and the label of the x axis.
const BOTTOM: f64 = 50.0;
const LEGEND_LINE: f64 = 18.0;

/// The start of a file of charts: such a file may be replaced.
pub const CONTENT: Content = Content { name: "a plot of lowbit's", begins: COMMENT.as_bytes() };
const COMMENT: &str = "<!-- lowbit plot -->\n";

/// The charts as an SVG document.
pub fn svg(charts: &[Chart]) -> String {
    let mut body = String::new();
    let mut y = 0.0;
    for chart in charts {
        y += draw(chart, y, &mut body);
    }
    format!(
        "{COMMENT}<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{y}\" viewBox=\"0 0 {WIDTH} {y}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

/// From `low` to `high`, marked every `step`.
struct Axis {
    low: f64,
    high: f64,
    step: f64,
}

impl Axis {
    /// The shortest axis of whole steps of 1, 2 or 5 times a power of ten that holds `values`, in
    /// eight steps at most.
    fn new(values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(v), b.max(v)));
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        // A single value gets room around it.
        let (low, high) = if low < high { (low, high) } else { (low, low + low.abs().max(1e-6)) };
        let power = 10f64.powf(((high - low) / 8.0).log10().floor());
        let fits = |step: &f64| (high / step).ceil() - (low / step).floor() <= 8.0;
        let step =
            [1.0, 2.0, 5.0, 10.0, 20.0].map(|n| n * power).into_iter().find(fits).unwrap_or(high - low);
        Self { low: (low / step).floor() * step, high: (high / step).ceil() * step, step }
    }

    /// The place of `value` along the axis, from 0 to 1.
    fn part(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    /// The marks' places and texts.
    fn marks(&self) -> impl Iterator<Item = (f64, String)> {
        // A power of ten may be off by a rounding.
        let digits = (-self.step.log10() - 1e-9).ceil().clamp(0.0, 12.0) as usize;
        let count = ((self.high - self.low) / self.step).round() as usize;
        (0..=count).map(move |i| {
            let value = self.low + i as f64 * self.step;
            (value, format!("{value:.digits$}"))
        })
    }
}

/// Draws a chart whose upper edge is at `y`, and returns its height.
fn draw(chart: &Chart, y: f64, out: &mut String) -> f64 {
    let points = || chart.series.iter().flat_map(|series| &series.points);
    let x_axis = Axis::new(points().map(|point| point.0));
    let y_axis = Axis::new(points().map(|point| point.1).chain([0.0]));
    let width = WIDTH - LEFT - RIGHT;
    let (top, bottom) = (y + TOP, y + TOP + PLOT_HEIGHT);
    let at = |(x, y): (f64, f64)| (LEFT + x_axis.part(x) * width, bottom - y_axis.part(y) * PLOT_HEIGHT);
    text(out, (WIDTH / 2.0, y + 24.0), "middle", &chart.title);
    for (value, label) in x_axis.marks() {
        let x = at((value, y_axis.low)).0;
        line(out, (x, top), (x, bottom));
        text(out, (x, bottom + 16.0), "middle", &label);
    }
    for (value, label) in y_axis.marks() {
        let y = at((x_axis.low, value)).1;
        line(out, (LEFT, y), (LEFT + width, y));
        text(out, (LEFT - 6.0, y + 4.0), "end", &label);
    }
    text(out, (LEFT + width / 2.0, bottom + 36.0), "middle", chart.x_label);
    text(out, (6.0, top - 10.0), "start", chart.y_label);
    for (index, series) in chart.series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let places: Vec<_> = series.points.iter().map(|&point| at(point)).collect();
        if series.joined {
            let path: Vec<_> = places.iter().map(|(x, y)| format!("{x:.2},{y:.2}")).collect();
            let path = path.join(" ");
            push(out, format_args!("<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\"/>"));
        }
        let radius = if series.joined { 2 } else { 5 };
        for (x, y) in places {
            push(out, format_args!("<circle cx=\"{x:.2}\" cy=\"{y:.2}\" r=\"{radius}\" fill=\"{colour}\"/>"));
        }
        let y = bottom + BOTTOM + (index as f64 + 0.5) * LEGEND_LINE;
        let side = "width=\"10\" height=\"10\"";
        push(out, format_args!("<rect x=\"{LEFT}\" y=\"{}\" {side} fill=\"{colour}\"/>", y - 9.0));
        text(out, (LEFT + 16.0, y), "start", &series.name);
    }
    TOP + PLOT_HEIGHT + BOTTOM + chart.series.len() as f64 * LEGEND_LINE + 10.0
}

fn line(out: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    push(
        out,
        format_args!(
            "<line x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\" stroke=\"#dddddd\"/>"
        ),
    );
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let text = escape(text);
    push(out, format_args!("<text x=\"{x:.2}\" y=\"{y:.2}\" text-anchor=\"{anchor}\">{text}</text>"));
}

fn push(out: &mut String, element: std::fmt::Arguments<'_>) {
    // Writing to a string does not fail.
    _ = writeln!(out, "{element}");
}

/// Text for XML, which has no control characters.
fn escape(text: &str) -> String {
    shown(text).to_string().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that elements are closed in order and that nothing but entities begins with `&`.
    /// Returns how many there are of `name`.
    fn count(svg: &str, name: &str) -> usize {
        let (mut open, mut found) = (vec![], 0);
        let svg = svg.strip_prefix(COMMENT).expect("it begins with what lowbit's plots begin with");
        for part in svg.split('<').skip(1) {
            let (tag, text) = part.split_once('>').expect("every < has its >");
            assert!(!text.contains('>') && tag.matches('"').count() % 2 == 0, "{part}");
            let plain =
                ["&amp;", "&lt;", "&gt;"].iter().fold(text.to_string(), |text, e| text.replace(e, ""));
            assert!(!plain.contains('&') && !plain.contains(|c: char| c.is_control() && c != '\n'), "{part}");
            match tag.strip_prefix('/') {
                Some(tag) => assert_eq!(open.pop(), Some(tag)),
                None => {
                    let word = tag.split([' ', '/']).next().unwrap();
                    found += usize::from(word == name);
                    // A comment is closed where it is opened.
                    if !tag.ends_with('/') && !tag.starts_with("!--") {
                        open.push(word);
                    }
                }
            }
        }
        assert!(open.is_empty(), "{open:?}");
        found
    }

    #[test]
    fn every_point_is_drawn_and_names_are_escaped() {
        let points = |n: usize| (0..n).map(|i| (i as f64, (i * i) as f64 * 1e-3)).collect::<Vec<_>>();
        let series = |name: &str, n, joined| Series { name: name.into(), points: points(n), joined };
        let chart = |series| Chart { title: "a & b".into(), x_label: "x", y_label: "y", series };
        let charts = [
            chart(vec![series("<b>\u{1}\n", 64, true), series("\"two\" ]]>", 7, true)]),
            chart(vec![series("one", 1, false)]),
            chart(vec![]),
        ];
        let svg = svg(&charts);
        assert_eq!(["circle", "polyline", "svg"].map(|name| count(&svg, name)), [72, 2, 1]);
        assert!(svg.contains("&lt;b&gt;") && svg.contains("a &amp; b") && !svg.contains("NaN"));
    }

    #[test]
    fn axes_hold_their_values_in_whole_steps() {
        for values in
            [[0.0, 0.043], [1.0, 511.0], [-3.0, 4.5], [4.5, 4.5], [0.0, 0.0], [0.0, 1e-9], [0.0, 1e30]]
        {
            let axis = Axis::new(values.into_iter());
            let count = ((axis.high - axis.low) / axis.step).round();
            assert!(axis.low <= values[0] && axis.high >= values[1], "{values:?}");
            assert!((1.0..=8.0).contains(&count), "{values:?}: {count} steps");
            assert_eq!(axis.marks().count() as f64, count + 1.0);
        }
        let marks: Vec<_> = Axis::new([0.0, 0.043].into_iter()).marks().map(|mark| mark.1).collect();
        assert_eq!(marks, ["0.00", "0.01", "0.02", "0.03", "0.04", "0.05"]);
    }
}
