"""Traces as files: the timeline of a run in the format of Chrome's trace viewer and Perfetto."""
