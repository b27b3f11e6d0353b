"""pytest's words, and with `options` and `suite` the only room that knows them. The plugin itself is `hooks`; the rest
is imported when a distributed test needs it."""
