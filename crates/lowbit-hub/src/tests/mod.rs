mod hostile;
mod ordinary;
mod planted;
pub(crate) mod server;
