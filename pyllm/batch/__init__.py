"""Many prompts from a file, answered side by side; each answer appended to a file that a second run resumes.

    input -> lines -> runner -> records -> output

`input` reads entries one at a time; `template` makes prompts of their fields; `lines` turns an entry into a job, or
says what is wrong with it; `runner` keeps so many jobs going on an engine; `records` is what is written about each,
`output` the file, `settings` what a second run must have in common with the first; `parallel` chooses how many run at
the same time. What is wrong with one line becomes a record (`LineError`); any other `PyllmError` stops the whole.

What prompts share is found where they begin to run, in the scheduler (`prompt_cache`); `prefixes` only sees to it that
a long beginning is there before lines that share it start together. `cached_tokens` is what the engine says.
"""
