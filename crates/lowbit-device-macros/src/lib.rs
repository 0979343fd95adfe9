//! `#[kernel]` and `#[derive(LaunchArgs)]`: a GPU kernel's launch has one named field per argument
//! of its signature, so that a launch with a missing, surplus or swapped argument does not compile.
//! The generated code names modules of `lowbit-device`.

mod args;
mod kernel;
mod sources;

use proc_macro::TokenStream;
use syn::parse_macro_input;

/// Makes a function a GPU kernel, in CubeCL's language, and gives it a struct to launch it with.
///
/// For
/// `fn silu_mul<X: Int, V: Size>(gate: &[X], up: &[X], y: &mut [X], len: u32, #[comptime] dtype: FloatType)`
/// that is
///
/// ```ignore
/// struct SiluMul<'a> { gate: Buffer<'a>, up: Buffer<'a>, y: Buffer<'a>, len: u32 }
/// ```
///
/// `SiluMul::kernel::<X>(target, units, v, dtype)` is the kernel compiled for these types and
/// values, in cubes of `units` units, and `Gpu::launch(kernel, cubes, SiluMul { .. })` launches it.
///
/// | parameter | field |
/// |---|---|
/// | `&[T]`, `&mut [T]` | `Buffer<'a>` |
/// | `u32` | itself |
/// | `&Group<..>`, `&mut Group<..>`: buffers, with `#[derive(CubeType, CubeLaunch, LaunchArgs)]` | `GroupArgs<'a>` |
/// | `Group`: scalars, with the same | itself |
/// | `#[comptime]` | none: an argument of `kernel` |
///
/// On Hopper and later a launch may begin before the one before it has ended. A kernel waits for
/// that end in its first statement, or, with `#[kernel(waits)]`, where it calls `overlap()`. The
/// leading parameters marked `#[early]` are what it reads before that.
#[proc_macro_attribute]
pub fn kernel(options: TokenStream, function: TokenStream) -> TokenStream {
    let options = parse_macro_input!(options as kernel::Options);
    let function = parse_macro_input!(function as syn::ItemFn);
    kernel::expand(options, function).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Makes a struct one argument of a [`macro@kernel`]: all buffers (`Box<[T]>`) or all scalars
/// (`u32`). With buffers, the launch takes a struct of the same fields called `..Args<'a>`.
#[proc_macro_derive(LaunchArgs)]
pub fn launch_args(item: TokenStream) -> TokenStream {
    let item = parse_macro_input!(item as syn::ItemStruct);
    args::expand(item).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// A number of the sources of the crate in which this stands, in hexadecimal digits: it names a
/// build of the crate's kernels, so that compiled ones of another build are not taken for them.
#[proc_macro]
pub fn sources(_: TokenStream) -> TokenStream {
    match sources::digest() {
        Ok(digest) => quote::quote!(#digest).into(),
        Err(error) => {
            let message = error.to_string();
            quote::quote!(::std::compile_error!(#message)).into()
        }
    }
}
