use std::io::{Read, Write};

use super::*;

/// The names in a folder, without those of locks.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.ends_with(".lock"));
    names.sort();
    names
}

/// Makes a link to a file; false where the system does not let everybody do
/// that.
fn link(target: &Path, path: &Path) -> bool {
    #[cfg(unix)]
    std::os::unix::fs::symlink(target, path).unwrap();
    // Older versions of wine say that they have made one.
    #[cfg(windows)]
    let _ = std::os::windows::fs::symlink_file(target, path);
    std::fs::symlink_metadata(path).is_ok()
}

/// A checkpoint of one file, whose content is `text`.
fn fill(folder: &Path, text: &str) {
    std::fs::write(folder.join("config.json"), text).unwrap();
}

fn content(output: &Path) -> String {
    std::fs::read_to_string(output.join("config.json")).unwrap()
}

#[test]
fn a_directory_is_seen_when_it_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("a/b/model/");
    let staged = Staged::directory(&output, Existing::Refuse).unwrap();
    fill(staged.path(), "new");
    std::fs::create_dir(staged.path().join("more")).unwrap();
    assert_eq!(names(&folder.path().join("a/b")), ["model.lowbit-partial"]);
    staged.commit().unwrap();
    assert_eq!(names(&folder.path().join("a/b")), ["model"]);
    assert_eq!(content(&output), "new");
}

#[test]
fn what_is_not_committed_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let staged = Staged::directory(&folder.path().join("a/b/model"), Existing::Refuse).unwrap();
    fill(staged.path(), "new");
    drop(staged);
    drop(Staged::file(&folder.path().join("c/model.gguf"), Existing::Replace(Content::CHECKPOINT)).unwrap());
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn a_file_is_seen_when_it_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model.gguf");
    for (existing, text) in [(Existing::Refuse, "one"), (Existing::Replace(Content::CHECKPOINT), "two")] {
        let mut staged = Staged::file(&output, existing).unwrap();
        staged.file_handle().write_all(text.as_bytes()).unwrap();
        staged.commit().unwrap();
        assert_eq!(std::fs::read_to_string(&output).unwrap(), text);
        assert_eq!(names(folder.path()), ["model.gguf"]);
    }
    assert!(matches!(Staged::file(&output, Existing::Refuse), Err(FileError::Exists { .. })));
}

#[test]
fn what_is_continued_stays_until_it_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("a/targets");
    for text in ["one", "two"] {
        let mut staged = Staged::continued(&output, Existing::Refuse).unwrap();
        let message = Staged::continued(&output, Existing::Refuse).unwrap_err().to_string();
        assert!(message.contains("is being written by another process"), "{message}");
        let mut before = String::new();
        staged.file_handle().read_to_string(&mut before).unwrap();
        assert_eq!(before, if text == "one" { "" } else { "one" });
        staged.file_handle().write_all(text.as_bytes()).unwrap();
        if text == "two" {
            staged.commit().unwrap();
        }
    }
    assert_eq!(std::fs::read_to_string(&output).unwrap(), "onetwo");
    assert_eq!(names(&folder.path().join("a")), ["targets"]);
    assert!(matches!(Staged::continued(&output, Existing::Refuse), Err(FileError::Exists { .. })));
    // Another kind of output goes on with nothing.
    let other = folder.path().join("other");
    std::fs::create_dir(folder.path().join("other.lowbit-partial")).unwrap();
    assert!(Staged::continued(&other, Existing::Refuse).is_err());
}

#[test]
fn one_writer_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model");
    for existing in [Existing::Refuse, Existing::Replace(Content::CHECKPOINT)] {
        let first = Staged::directory(&output, existing).unwrap();
        fill(first.path(), "first");
        let message = Staged::directory(&output, existing).unwrap_err().to_string();
        assert!(message.contains("is being written by another process"), "{message}");
        assert_eq!(content(first.path()), "first", "the loser touches nothing");
        first.commit().unwrap();
        assert_eq!(content(&output), "first");
    }
}

#[test]
fn leftovers_of_the_dead_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model");
    let left = folder.path().join("model.lowbit-partial");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(left.join("model.safetensors"), "half").unwrap();
    let staged = Staged::directory(&output, Existing::Refuse).unwrap();
    assert_eq!(names(staged.path()), [""; 0]);
    staged.commit().unwrap();
    // A file or link in that place is nobody's leftover.
    for place in 0..2 {
        match place {
            0 => std::fs::write(&left, "mine").unwrap(),
            _ if link(&output, &left) => {}
            _ => continue,
        }
        let message = Staged::directory(&folder.path().join("model"), Existing::Replace(Content::CHECKPOINT))
            .unwrap_err();
        assert!(message.to_string().contains("model"), "{message}");
        std::fs::remove_file(&left).unwrap();
    }
}

#[test]
fn replacing_exchanges_the_names() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model");
    std::fs::create_dir(&output).unwrap();
    fill(&output, "old");
    assert!(matches!(Staged::directory(&output, Existing::Refuse), Err(FileError::Exists { .. })));
    let staged = Staged::directory(&output, Existing::Replace(Content::CHECKPOINT)).unwrap();
    fill(staged.path(), "new");
    assert_eq!(content(&output), "old");
    staged.commit().unwrap();
    assert_eq!(content(&output), "new");
    assert_eq!(names(folder.path()), ["model"]);
}

#[test]
fn the_name_may_be_taken_in_the_meantime() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model");
    let staged = Staged::directory(&output, Existing::Refuse).unwrap();
    std::fs::create_dir(&output).unwrap();
    assert!(matches!(staged.commit(), Err(FileError::Exists { .. })));
    assert_eq!(names(folder.path()), ["model"]);
    // Or may have become what is not replaced.
    fill(&output, "old");
    let staged = Staged::directory(&output, Existing::Replace(Content::CHECKPOINT)).unwrap();
    std::fs::create_dir(output.join("photos")).unwrap();
    assert!(matches!(staged.commit(), Err(FileError::Output { .. })));
    assert_eq!(content(&output), "old");
}

#[test]
fn only_checkpoints_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model");
    let refused = |want: &str| {
        let message =
            Staged::directory(&output, Existing::Replace(Content::CHECKPOINT)).unwrap_err().to_string();
        assert!(message.contains(want), "{message}");
        assert_eq!(names(folder.path()), ["model"]);
    };
    std::fs::write(&output, "text").unwrap();
    refused("is no directory");
    std::fs::remove_file(&output).unwrap();
    if link(Path::new("nowhere"), &output) {
        refused("is a link to nowhere");
        std::fs::remove_file(&output).unwrap();
    }
    std::fs::create_dir(&output).unwrap();
    std::fs::write(output.join("letter.txt"), "text").unwrap();
    refused("no config.json");
    fill(&output, "old");
    std::fs::create_dir(output.join("photos")).unwrap();
    refused("holds a folder, photos");
    std::fs::remove_dir(output.join("photos")).unwrap();
    let templates = output.join("additional_chat_templates");
    std::fs::create_dir(&templates).unwrap();
    std::fs::write(templates.join("tool_use.jinja"), "").unwrap();
    drop(Staged::directory(&output, Existing::Replace(Content::CHECKPOINT)).unwrap());
    std::fs::write(templates.join("letter.txt"), "").unwrap();
    refused("holds a folder, additional_chat_templates");
    for none in [".", "..", "/", "a/..", ""] {
        let message = Staged::directory(Path::new(none), Existing::Replace(Content::CHECKPOINT))
            .unwrap_err()
            .to_string();
        assert!(message.contains("is no name for something new"), "{message}");
    }
    let below = folder.path().join("model/letter.txt/new");
    assert!(matches!(Staged::directory(&below, Existing::Refuse), Err(FileError::Io { .. })));
}

#[test]
fn many_at_once_make_one() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model");
    let write = |i: usize| -> Result<(), FileError> {
        let staged = Staged::directory(&output, Existing::Refuse)?;
        fill(staged.path(), &"x".repeat(i));
        staged.commit()
    };
    for _ in 0..20 {
        let won = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..8).map(|i| scope.spawn(move || write(i).is_ok())).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).filter(|&won| won).count()
        });
        assert_eq!(won, 1);
        assert_eq!(names(folder.path()), ["model"]);
        std::fs::remove_dir_all(&output).unwrap();
    }
}

/// Makes a FIFO at `path`.
#[cfg(unix)]
fn fifo(path: &Path) {
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[cfg(unix)]
#[test]
fn outputs_are_regular_files() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("file");
    let refused = |existing, want: &str| {
        for staged in [Staged::file(&output, existing), Staged::continued(&output, existing)] {
            let message = staged.unwrap_err().to_string();
            assert!(message.contains(want), "{message}");
        }
    };
    for existing in [Existing::Refuse, Existing::Replace(Content::GGUF)] {
        fifo(&output);
        refused(existing, "file: is a FIFO; an output is a regular file");
        std::fs::remove_file(&output).unwrap();
        // A FIFO under the staging name is no leftover of an earlier run, and stays.
        let partial = folder.path().join("file.lowbit-partial");
        fifo(&partial);
        refused(existing, "file.lowbit-partial: is a FIFO; an output is a regular file");
        std::fs::remove_file(&partial).unwrap();
        let socket = std::os::unix::net::UnixListener::bind(&output).unwrap();
        refused(existing, "file: is a socket; an output is a regular file");
        drop(socket);
        std::fs::remove_file(&output).unwrap();
        link(Path::new("/dev/full"), &output);
        refused(existing, "file: is a link to /dev/full; name a new path");
        std::fs::remove_file(&output).unwrap();
    }
    let message = open_to_write(Path::new("/dev/full")).unwrap_err().to_string();
    assert!(message.contains("/dev/full: is a device; an output is a regular file"), "{message}");
    // In a directory, nobody waits for it either.
    let staged = Staged::directory(&folder.path().join("model"), Existing::Refuse).unwrap();
    fifo(&staged.path().join("config.json"));
    let message = staged.commit().unwrap_err().to_string();
    assert!(message.contains("config.json: is a FIFO"), "{message}");
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn only_files_of_the_same_kind_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("file");
    let replace = || Staged::file(&output, Existing::Replace(Content::GGUF));
    for (before, replaced) in [("", true), ("GGUF and more", true), ("GGU", false), ("a letter", false)] {
        std::fs::write(&output, before).unwrap();
        match replace() {
            Ok(staged) => staged.commit().unwrap(),
            Err(error) => {
                let message = error.to_string();
                assert!(message.ends_with("file: is not a GGUF file, and is not replaced"), "{message}");
            }
        }
        let after = if replaced { "" } else { before };
        assert_eq!(std::fs::read_to_string(&output).unwrap(), after, "{before}");
    }
    // Or was written meanwhile.
    std::fs::write(&output, "GGUF").unwrap();
    let staged = replace().unwrap();
    std::fs::write(&output, "a letter").unwrap();
    assert!(matches!(staged.commit(), Err(FileError::Output { .. })));
    assert_eq!(std::fs::read_to_string(&output).unwrap(), "a letter");
}

#[test]
fn only_what_was_made_is_renamed_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model");
    for commits in [true, false] {
        let staged = Staged::directory(&output, Existing::Refuse).unwrap();
        let partial = staged.path().to_path_buf();
        std::fs::rename(&partial, folder.path().join("moved")).unwrap();
        std::fs::create_dir(&partial).unwrap();
        fill(&partial, "another's");
        if commits {
            let message = staged.commit().unwrap_err().to_string();
            assert!(
                message.contains("model.lowbit-partial: was moved or replaced while it was written"),
                "{message}"
            );
        } else {
            drop(staged);
        }
        assert_eq!(content(&partial), "another's");
        assert_eq!(names(folder.path()), ["model.lowbit-partial", "moved"]);
        std::fs::remove_dir_all(&partial).unwrap();
        std::fs::remove_dir(folder.path().join("moved")).unwrap();
    }
}
