// hiprtc_compile LIBRARY SOURCE CODE OPTION...: compile a source with hiprtc into the file CODE; the log goes to stderr.
//
// Exit status: 0 compiled, 1 the source has errors, 2 hiprtc itself does not work.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static void *library;

static void *symbol(const char *name) {
    void *const found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    return found;
}

static char *read_file(const char *path) {
    FILE *const file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) {
        perror(path);
        exit(2);
    }
    const long size = ftell(file);
    rewind(file);
    char *const text = malloc(size + 1);
    if (!text || fread(text, 1, size, file) != (size_t)size) {
        perror(path);
        exit(2);
    }
    text[size] = 0;
    fclose(file);
    return text;
}

static void write_file(const char *path, const char *data, size_t size) {
    FILE *const file = fopen(path, "wb");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file)) {
        perror(path);
        exit(2);
    }
}

int main(int count, char **arguments) {
    if (count < 4) {
        fprintf(stderr, "usage: hiprtc_compile LIBRARY SOURCE CODE OPTION...\n");
        return 2;
    }
    library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    int (*const create)(void **, const char *, const char *, int, const char **, const char **) =
        symbol("hiprtcCreateProgram");
    int (*const compile)(void *, int, const char **) = symbol("hiprtcCompileProgram");
    int (*const log_size)(void *, size_t *) = symbol("hiprtcGetProgramLogSize");
    int (*const get_log)(void *, char *) = symbol("hiprtcGetProgramLog");
    int (*const code_size)(void *, size_t *) = symbol("hiprtcGetCodeSize");
    int (*const get_code)(void *, char *) = symbol("hiprtcGetCode");

    void *program = NULL;
    if (create(&program, read_file(arguments[2]), "kernel.cu", 0, NULL, NULL)) {
        fprintf(stderr, "hiprtcCreateProgram failed\n");
        return 2;
    }
    const int result = compile(program, count - 4, (const char **)arguments + 4);
    size_t size = 0;
    log_size(program, &size);
    if (size > 1) {
        char *const log = calloc(size + 1, 1);
        get_log(program, log);
        fprintf(stderr, "%s\n", log);
    }
    if (result) {
        return 1;
    }
    if (code_size(program, &size)) {
        fprintf(stderr, "hiprtcGetCodeSize failed\n");
        return 2;
    }
    char *const code = malloc(size);
    if (!code || get_code(program, code)) {
        fprintf(stderr, "hiprtcGetCode failed\n");
        return 2;
    }
    write_file(arguments[3], code, size);
    return 0;
}
