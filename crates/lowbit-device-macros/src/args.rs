//! The derive `LaunchArgs`.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::{Error, Fields, ItemStruct, Result, Type};

pub fn expand(item: ItemStruct) -> Result<TokenStream> {
    let Fields::Named(fields) = &item.fields else {
        return Err(Error::new_spanned(&item, "arguments have names"));
    };
    let names: Vec<_> = fields.named.iter().map(|field| &field.ident).collect();
    let buffers = fields.named.iter().filter(|field| is_buffer(&field.ty)).count();
    if buffers != 0 && buffers != names.len() {
        return Err(Error::new_spanned(&item, "buffers and scalars are different groups"));
    }
    let (vis, group) = (&item.vis, &item.ident);
    let compiled = format_ident!("{group}CompilationArg");
    let (generics, generic_names, bounds) = item.generics.split_for_impl();
    let unbound = quote! {
        impl #generics ::lowbit_device::gpu::launch::Unbound for #compiled #generic_names #bounds {
            fn unbound() -> Self {
                Self { #(#names: ::lowbit_device::gpu::launch::Unbound::unbound(),)* }
            }
        }
    };
    let bind = quote! {
        fn bind(self, to: &mut ::lowbit_device::gpu::launch::Bound<'a>) {
            #(::lowbit_device::gpu::launch::Bind::bind(self.#names, to);)*
        }
    };
    if buffers == 0 {
        return Ok(quote! {
            #unbound

            impl<'a> ::lowbit_device::gpu::launch::Bind<'a> for #group {
                #bind
            }
        });
    }
    let args = format_ident!("{group}Args");
    let doc = format!("The buffers of [`{group}`].");
    Ok(quote! {
        #unbound

        #[doc = #doc]
        #[derive(Clone, Copy)]
        #vis struct #args<'a> {
            #(#vis #names: ::lowbit_device::gpu::launch::Buffer<'a>,)*
        }

        impl<'a> ::lowbit_device::gpu::launch::Bind<'a> for #args<'a> {
            #bind
        }
    })
}

/// True if a field is a `Box` of a slice.
fn is_buffer(field: &Type) -> bool {
    matches!(field, Type::Path(path) if path.path.segments.last().is_some_and(|last| last.ident == "Box"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use syn::parse_quote;

    #[test]
    fn buffers_get_a_struct_of_their_own() {
        let got = expand(parse_quote!(
            pub struct Planes<S: Int> {
                pub codes: Box<[u32]>,
                pub scales: Box<[S]>,
            }
        ));
        let want = quote! {
            pub struct PlanesArgs<'a> {
                pub codes: ::lowbit_device::gpu::launch::Buffer<'a>,
                pub scales: ::lowbit_device::gpu::launch::Buffer<'a>,
            }
        };
        let got = got.unwrap().to_string();
        assert!(got.contains(&want.to_string()), "{got}");
    }

    #[test]
    fn scalars_are_bound_as_they_are() {
        let got = expand(parse_quote!(
            struct Sizes {
                n: u32,
            }
        ));
        let got = got.unwrap().to_string();
        assert!(got.contains("for Sizes") && !got.contains("SizesArgs"), "{got}");
    }

    #[test]
    fn buffers_and_scalars_do_not_mix() {
        let mixed = expand(parse_quote!(
            struct Mixed {
                n: u32,
                x: Box<[u32]>,
            }
        ));
        assert_eq!(mixed.unwrap_err().to_string(), "buffers and scalars are different groups");
    }
}
