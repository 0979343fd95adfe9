//! The attribute `kernel`.

use proc_macro2::{Ident, TokenStream};
use quote::{format_ident, quote};
use syn::parse::{Parse, ParseStream};
use syn::{
    Attribute, Error, FnArg, GenericParam, ItemFn, Pat, PatType, Result, Stmt, Type, TypeParamBound,
    parse_quote,
};

/// The text in the attribute's parentheses.
pub struct Options {
    /// True if the kernel itself says where it waits for the launch before it.
    waits: bool,
}

impl Parse for Options {
    fn parse(input: ParseStream) -> Result<Self> {
        if input.is_empty() {
            return Ok(Self { waits: false });
        }
        let option: Ident = input.parse()?;
        if option != "waits" {
            return Err(Error::new(option.span(), "`waits` is the one option"));
        }
        Ok(Self { waits: true })
    }
}

/// A parameter that a launch binds.
struct Argument {
    name: Ident,
    /// The type of its field.
    field: TokenStream,
    early: bool,
    /// True if the kernel writes it.
    written: bool,
}

/// A value that the kernel is compiled for.
struct Constant {
    name: Ident,
    of_type: TokenStream,
}

pub fn expand(options: Options, mut function: ItemFn) -> Result<TokenStream> {
    let mut arguments = Vec::new();
    // The sizes of vectors come first.
    let mut constants: Vec<Constant> = sizes(&function)
        .map(|size| Constant {
            name: format_ident!("{}", size.to_string().to_lowercase()),
            of_type: quote!(usize),
        })
        .collect();
    for input in &mut function.sig.inputs {
        let FnArg::Typed(input) = input else {
            return Err(Error::new_spanned(input, "a kernel has no receiver"));
        };
        match take(&mut input.attrs, "early") {
            early if !is_comptime(input) => arguments.push(argument(input, early)?),
            _ => {
                let (name, of_type) = (name(input)?, &input.ty);
                constants.push(Constant { name, of_type: quote!(#of_type) });
            }
        }
    }
    let leading = arguments.iter().take_while(|argument| argument.early).count();
    if let Some(argument) = arguments[leading..].iter().find(|argument| argument.early) {
        return Err(Error::new(argument.name.span(), "what is read early comes first"));
    }
    if !options.waits {
        let statements = &mut function.block.stmts;
        if let Some(Stmt::Expr(_, semicolon)) = statements.last_mut() {
            semicolon.get_or_insert_default();
        }
        statements.insert(0, parse_quote!(::lowbit_device::gpu::compile::begin();));
        statements.push(parse_quote!(::lowbit_device::gpu::compile::end();));
    }
    let launch = launch(&function, &arguments, leading, &constants);
    Ok(quote! {
        #[cubecl::prelude::cube(launch_unchecked)]
        #function
        #launch
    })
}

/// The struct that the kernel is launched with.
fn launch(function: &ItemFn, arguments: &[Argument], early: usize, constants: &[Constant]) -> TokenStream {
    let (vis, entry) = (&function.vis, &function.sig.ident);
    let launch = Ident::new(&pascal_case(&entry.to_string()), entry.span());
    let (names, fields): (Vec<_>, Vec<_>) = arguments.iter().map(|it| (&it.name, &it.field)).unzip();
    let (values, types): (Vec<_>, Vec<_>) = constants.iter().map(|it| (&it.name, &it.of_type)).unzip();
    let unbound = names.iter().map(|_| quote!(::lowbit_device::gpu::launch::Unbound::unbound()));
    let bind = arguments.iter().map(|Argument { name, written, .. }| match written {
        true => quote!(to.written(self.#name);),
        false => quote!(self.#name.bind(to);),
    });
    let bind: Vec<_> = bind.collect();
    let (reads_early, others) = bind.split_at(early);
    // The sizes of vectors are values; the other generic parameters are types.
    let sizes: Vec<_> = sizes(function).collect();
    let params = || function.sig.generics.type_params().filter(|param| !sizes.contains(&&param.ident));
    let (generics, generic_names) = (params(), params().map(|param| &param.ident));
    let doc = format!("What [`{entry}()`] is launched with.");
    quote! {
        #[doc = #doc]
        #[derive(Clone, Copy)]
        #vis struct #launch<'a> {
            #(#vis #names: #fields,)*
        }

        impl #launch<'_> {
            /// The kernel for these types and values, in cubes of `units` units.
            #[allow(clippy::too_many_arguments)]
            #vis fn kernel<#(#generics),*>(
                target: &::lowbit_device::gpu::compile::Target,
                units: usize,
                #(#values: #types),*
            ) -> ::lowbit_device::gpu::launch::Kernel<#launch<'static>> {
                let (settings, properties, registers) = target.start(units as u32);
                ::lowbit_device::gpu::launch::Kernel::new(#entry::#launch::<#(#generic_names),*>::new(
                    settings, properties, registers, #(#unbound,)* #(#values),*
                ))
            }
        }

        impl<'a> ::lowbit_device::gpu::launch::Arguments<'a> for #launch<'a> {
            type Entry = #launch<'static>;

            fn bind(self, to: &mut ::lowbit_device::gpu::launch::Bound<'a>) {
                use ::lowbit_device::gpu::launch::Bind;
                #(#reads_early)*
                to.early();
                #(#others)*
            }
        }
    }
}

/// The generic parameters that are sizes of vectors.
fn sizes(function: &ItemFn) -> impl Iterator<Item = &Ident> {
    function.sig.generics.params.iter().filter_map(|param| match param {
        GenericParam::Type(param) => {
            let is_size = |bound: &TypeParamBound| matches!(bound, TypeParamBound::Trait(it) if it.path.is_ident("Size"));
            param.bounds.iter().any(is_size).then_some(&param.ident)
        }
        _ => None,
    })
}

fn is_comptime(input: &PatType) -> bool {
    input.attrs.iter().any(|attribute| attribute.path().is_ident("comptime"))
}

/// Removes an attribute; says whether it was there.
fn take(attributes: &mut Vec<Attribute>, name: &str) -> bool {
    let before = attributes.len();
    attributes.retain(|attribute| !attribute.path().is_ident(name));
    attributes.len() < before
}

fn name(input: &PatType) -> Result<Ident> {
    match &*input.pat {
        Pat::Ident(pat) => Ok(pat.ident.clone()),
        other => Err(Error::new_spanned(other, "an argument has a name")),
    }
}

fn argument(input: &PatType, early: bool) -> Result<Argument> {
    let field = match &*input.ty {
        Type::Reference(reference) => match &*reference.elem {
            Type::Slice(_) => quote!(::lowbit_device::gpu::launch::Buffer<'a>),
            Type::Path(group) => {
                let mut path = group.path.clone();
                let last = path.segments.last_mut().expect("a path has a segment");
                last.ident = format_ident!("{}Args", last.ident);
                last.arguments = syn::PathArguments::None;
                quote!(#path<'a>)
            }
            other => return Err(Error::new_spanned(other, "a slice or a group of buffers is wanted")),
        },
        scalars @ Type::Path(_) => quote!(#scalars),
        other => return Err(Error::new_spanned(other, "a buffer, a scalar or a group of either is wanted")),
    };
    let written = matches!(&*input.ty, Type::Reference(reference) if reference.mutability.is_some());
    Ok(Argument { name: name(input)?, field, early, written })
}

/// As CubeCL names a kernel's struct.
fn pascal_case(name: &str) -> String {
    let capital = |word: &str| word[..1].to_uppercase() + &word[1..];
    name.split('_').filter(|word| !word.is_empty()).map(capital).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(options: TokenStream, function: TokenStream) -> String {
        let expanded =
            syn::parse2::<Options>(options).and_then(|options| expand(options, syn::parse2(function)?));
        expanded.unwrap_err().to_string()
    }

    #[test]
    fn fields_are_the_parameters() {
        let function = parse_quote! {
            fn scale_rows<X: Int, V: Size>(
                #[early] weight: &Parts<X, V>, x: &[Vector<X, V>], y: &mut [X], sizes: Sizes, #[comptime] width: usize,
            ) {}
        };
        let got = expand(Options { waits: false }, function).unwrap().to_string();
        let fields = quote! {
            struct ScaleRows<'a> {
                weight: PartsArgs<'a>,
                x: ::lowbit_device::gpu::launch::Buffer<'a>,
                y: ::lowbit_device::gpu::launch::Buffer<'a>,
                sizes: Sizes,
            }
        };
        assert!(got.contains(&fields.to_string()), "{got}");
        let bound = quote! {
            self.weight.bind(to);
            to.early();
            self.x.bind(to);
            to.written(self.y);
            self.sizes.bind(to);
        };
        assert!(got.contains(&bound.to_string()), "{got}");
        assert!(got.contains(&quote!(fn kernel<X: Int>).to_string()), "{got}");
        assert!(got.contains(&quote!(units: usize, v: usize, width: usize).to_string()), "{got}");
        assert!(
            got.contains(
                &quote!({
                    ::lowbit_device::gpu::compile::begin();
                    ::lowbit_device::gpu::compile::end();
                })
                .to_string()
            ),
            "{got}"
        );
    }

    #[test]
    fn refusals() {
        let late = quote!(
            fn f(x: &[u32], #[early] y: &[u32]) {}
        );
        assert_eq!(error(quote!(), late), "what is read early comes first");
        let tuple = quote!(
            fn f(x: (u32, u32)) {}
        );
        assert_eq!(error(quote!(), tuple), "a buffer, a scalar or a group of either is wanted");
        assert_eq!(
            error(
                quote!(wait),
                quote!(
                    fn f() {}
                )
            ),
            "`waits` is the one option"
        );
        assert_eq!(
            error(
                quote!(),
                quote!(
                    fn f(self) {}
                )
            ),
            "a kernel has no receiver"
        );
    }
}
