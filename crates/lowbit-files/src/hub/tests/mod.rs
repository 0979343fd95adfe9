mod hostile;
mod ordinary;
mod planted;
mod server;
