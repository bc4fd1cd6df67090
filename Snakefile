include: "workflow/Snakefile"


rule all:
    default_target: True
    input:
        rules.align.input,
