# Fails if an object that is compiled for one level holds code that the linker may share with another level's.
#
# A function template of the standard library, or an inline function with external linkage, is a weak symbol in every
# object that uses it. The linker keeps one of them, be it the one with AVX-512 in it, and all callers get that one.
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols RESULT_VARIABLE failed ERROR_QUIET)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
  if(NOT failed AND weak)
    list(JOIN weak "\n  " weak)
    message(FATAL_ERROR "${object} shares code with other levels:\n  ${weak}\nPut it into an anonymous namespace inside "
      "KVW_NS, or do without that part of the standard library (see levels.h).")
  endif()
endforeach()
