"""Being written by cli helper B; see /tmp/notes/cli-split.md."""
